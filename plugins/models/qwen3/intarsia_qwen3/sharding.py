"""Which role each module plays when the model is cut: rows (module pattern, role). The parallel plugins give roles their meaning. Torch-free.

Norms over a query or key head are one for all heads: every rank has them, each with its own heads' share of the gradient, as `attention_heads` has it.
"""

from __future__ import annotations

from intarsia_models_common.config import SwiGLUConfig
from intarsia_models_common.moe.config import MoEConfig

from intarsia_qwen3.config import Qwen3Config

Row = tuple[str, str]

_ATTENTION: tuple[Row, ...] = (
    ("attention_norm", "sequence"),
    ("attention", "attention_heads"),
    ("attention.wq", "column"),
    ("attention.wk", "column"),
    ("attention.wv", "column"),
    ("attention.wo", "row"),
    ("feed_forward_norm", "sequence"),
)
_DENSE: tuple[Row, ...] = (
    ("feed_forward", "region"),
    ("feed_forward.w1", "column"),
    ("feed_forward.w3", "column"),
    ("feed_forward.w2", "row"),
)
_EXPERTS: tuple[Row, ...] = (("feed_forward.router", "sequence"), ("feed_forward.experts", "expert"))


def table(config: Qwen3Config) -> tuple[Row, ...]:
    """The rows for a model of this config: for the modules that it has, and no others."""
    rows: list[Row] = [("tok_embeddings", "vocab"), *((f"layers.*.{name}", role) for name, role in _ATTENTION)]
    for number, block in enumerate(config.layers):
        # A dense layer and one with experts have the same name, so that these rows name the layer.
        parts = {SwiGLUConfig: _DENSE, MoEConfig: _EXPERTS}.get(type(block.feed_forward), ())
        rows += [(f"layers.{number}.{name}", role) for name, role in parts]
    return (*rows, ("norm", "sequence"), ("head", "vocab"))
