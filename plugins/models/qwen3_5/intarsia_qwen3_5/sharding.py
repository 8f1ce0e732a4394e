"""Which role each module plays when the model is cut: rows (module pattern, role, settings). The parallel plugins give roles their meaning. Torch-free."""

from __future__ import annotations

from intarsia_models_common.config import AttentionConfig, BlockConfig
from intarsia_models_common.linear_attention.config import GatedDeltaNetConfig
from intarsia_models_common.linear_attention.sharding import delta_rows
from intarsia_models_common.sharding import Row, attention_rows, feed_forward_rows, norm_rows
from intarsia_models_common.vision.sharding import vision_rows

from intarsia_qwen3_5.config import Qwen35Config


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
    rows = norm_rows(place)
    if isinstance(block.attention, AttentionConfig):
        rows += attention_rows(f"{place}.attention", gate=block.attention.gate)
    if isinstance(block.attention, GatedDeltaNetConfig):
        rows += delta_rows(f"{place}.attention")
    return rows + feed_forward_rows(f"{place}.feed_forward", block.feed_forward)
