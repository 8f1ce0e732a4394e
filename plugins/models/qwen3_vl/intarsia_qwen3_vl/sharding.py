"""Which role each module plays when the model is cut: rows (module pattern, role, settings). The parallel plugins give roles their meaning. Torch-free."""

from __future__ import annotations

from intarsia_models_common.sharding import Row, attention_rows, feed_forward_rows, norm_rows
from intarsia_models_common.vision.sharding import vision_rows

from intarsia_qwen3_vl.config import Qwen3VLConfig


def table(config: Qwen3VLConfig) -> tuple[Row, ...]:
    """The rows for a model of this config: for the modules that it has, and no others."""
    rows: list[Row] = [("tok_embeddings", "vocab", {})]
    if config.vision is not None:
        rows += vision_rows("visual")
    rows += [*norm_rows("layers.*"), *attention_rows("layers.*.attention")]
    for i, block in enumerate(config.layers):
        rows += feed_forward_rows(f"layers.{i}.feed_forward", block.feed_forward)
    return (*rows, ("norm", "sequence", {}), ("head", "vocab", {}))
