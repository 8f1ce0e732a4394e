"""Which role each module plays when the model is cut: rows (module pattern, role, settings). The parallel plugins give roles their meaning. Torch-free."""

from __future__ import annotations

from intarsia_models_common.sharding import Row, attention_rows, feed_forward_rows, norm_rows

from intarsia_qwen3.config import Qwen3Config


def table(config: Qwen3Config) -> tuple[Row, ...]:
    """The rows for a model of this config: for the modules that it has, and no others."""
    rows: list[Row] = [("tok_embeddings", "vocab", {}), *norm_rows("layers.*"), *attention_rows("layers.*.attention")]
    for number, block in enumerate(config.layers):
        # A dense layer and one with experts have the same name, so that these rows name the layer.
        rows += feed_forward_rows(f"layers.{number}.feed_forward", block.feed_forward)
    return (*rows, ("norm", "sequence", {}), ("head", "vocab", {}))
