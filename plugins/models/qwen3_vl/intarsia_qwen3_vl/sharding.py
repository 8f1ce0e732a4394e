"""Which role each module plays when the model is cut: rows (module pattern, role, settings). The parallel plugins give roles their meaning. Torch-free."""

from __future__ import annotations

from typing import Any

from intarsia_models_common.moe.config import MoEConfig
from intarsia_models_common.vision.sharding import vision_rows

from intarsia_qwen3_vl.config import Qwen3VLConfig

Row = tuple[str, str, dict[str, Any]]

_ATTENTION: tuple[tuple[str, str], ...] = (
    ("attention_norm", "sequence"),
    ("attention", "attention_heads"),
    ("attention.wq", "column"),
    ("attention.wk", "column"),
    ("attention.wv", "column"),
    ("attention.wo", "row"),
    ("feed_forward_norm", "sequence"),
)
_DENSE = (("feed_forward", "region"), ("feed_forward.w1", "column"), ("feed_forward.w3", "column"), ("feed_forward.w2", "row"))
_SPARSE = (("feed_forward.router", "sequence"), ("feed_forward.experts", "expert"))


def table(config: Qwen3VLConfig) -> tuple[Row, ...]:
    """The rows for a model of this config: for the modules that it has, and no others."""
    rows: list[Row] = [("tok_embeddings", "vocab", {})]
    if config.vision is not None:
        rows += vision_rows("visual")
    rows += [(f"layers.*.{name}", role, {}) for name, role in _ATTENTION]
    for i, block in enumerate(config.layers):
        parts = _SPARSE if isinstance(block.feed_forward, MoEConfig) else _DENSE
        rows += [(f"layers.{i}.{name}", role, {}) for name, role in parts]
    return (*rows, ("norm", "sequence", {}), ("head", "vocab", {}))
