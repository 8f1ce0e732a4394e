"""Which role each module plays when the model is cut: rows (module pattern, role, settings). The parallel plugins give roles their meaning. Torch-free.

Shared experts are whole and work on the rank's own tokens, as routed ones do.
"""

from __future__ import annotations

from typing import Any

from intarsia_models_common.config import AttentionConfig, BlockConfig
from intarsia_models_common.linear_attention.config import GatedDeltaNetConfig
from intarsia_models_common.linear_attention.sharding import delta_rows
from intarsia_models_common.moe.config import MoEConfig
from intarsia_models_common.vision.sharding import vision_rows

from intarsia_qwen3_5.config import Qwen35Config

Row = tuple[str, str, dict[str, Any]]

_SOFTMAX = (("", "attention_heads"), (".wq", "column"), (".wk", "column"), (".wv", "column"), (".wg", "column"), (".wo", "row"))
_DENSE = (("", "region"), (".w1", "column"), (".w3", "column"), (".w2", "row"))
_SHARED = ("w1", "w3", "w2", "gate")


def table(config: Qwen35Config) -> tuple[Row, ...]:
    """The rows for a model of this config: for the modules that it has, and no others."""
    rows: list[Row] = [("tok_embeddings", "vocab", {})]
    if config.vision is not None:
        rows += vision_rows("visual")
    for i, block in enumerate(config.layers):
        rows += _block(f"layers.{i}", block)
    rows += [("norm", "sequence", {}), ("head", "vocab", {})]
    if config.ahead:
        rows.append(("following_embeddings", "vocab", {}))
    for k, block in enumerate(config.ahead):
        rows += [(f"mtp.{k}.{name}", "sequence", {}) for name in ("token_norm", "hidden_norm", "projection", "norm")]
        rows += _block(f"mtp.{k}.block", block)
    return tuple(rows)


def _block(place: str, block: BlockConfig) -> list[Row]:
    rows: list[Row] = [(f"{place}.attention_norm", "sequence", {}), (f"{place}.feed_forward_norm", "sequence", {})]
    if isinstance(block.attention, AttentionConfig):
        rows += [(f"{place}.attention{name}", role, {}) for name, role in _SOFTMAX]
    if isinstance(block.attention, GatedDeltaNetConfig):
        rows += delta_rows(f"{place}.attention")
    if isinstance(block.feed_forward, MoEConfig):
        rows += [(f"{place}.feed_forward.router", "sequence", {}), (f"{place}.feed_forward.experts", "expert", {})]
        rows += [(f"{place}.feed_forward.shared.{name}", "sequence", {}) for name in _SHARED]
    else:
        rows += [(f"{place}.feed_forward{name}", role, {}) for name, role in _DENSE]
    return rows
