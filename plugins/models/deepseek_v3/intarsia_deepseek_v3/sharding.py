"""Which role each module plays when the model is cut: rows (module pattern, role, settings). The parallel plugins give roles their meaning. Torch-free.

Attention: the narrow projections `wq_a` and `wkv_a` work on the rank's own tokens and gather their results, so that latents cross the wire and not the residual
stream; from there on every rank has all tokens and its own heads. The rotated key is one for all heads, and like the latents' norms it is computed on every
rank, each with its own heads' share of the gradient.
"""

from __future__ import annotations

from intarsia_models_common.config import BlockConfig, MLAConfig, SwiGLUConfig
from intarsia_models_common.sharding import Row, feed_forward_rows, norm_rows

from intarsia_deepseek_v3.config import DeepSeekV3Config


def table(config: DeepSeekV3Config) -> tuple[Row, ...]:
    """The rows for a model of this config: for the modules that it has, and no others."""
    rows: list[Row] = [("tok_embeddings", "vocab", {})]
    for i, block in enumerate(config.layers):
        rows += _block(f"layers.{i}", "layers.*", block)
    rows += [("norm", "sequence", {}), ("head", "vocab", {})]
    if config.ahead:
        rows.append(("following_embeddings", "vocab", {}))
        rows += [(f"mtp.*.{name}", "sequence", {}) for name in ("token_norm", "hidden_norm", "projection", "norm")]
    for k, block in enumerate(config.ahead):
        rows += _block(f"mtp.{k}.block", "mtp.*.block", block)
    return tuple(row for number, row in enumerate(rows) if row not in rows[:number])


def _block(place: str, every: str, block: BlockConfig) -> list[Row]:
    """Rows of one block. What only some blocks have under a name that others use for something else is named by its `place`, the rest by a pattern."""
    rows = norm_rows(every)
    if isinstance(block.attention, MLAConfig):
        rows += _attention(f"{place}.attention", f"{every}.attention", block.attention.q_rank is not None)
    where = place if isinstance(block.feed_forward, SwiGLUConfig) else every
    return rows + feed_forward_rows(f"{where}.feed_forward", block.feed_forward)


def _attention(place: str, every: str, query_latent: bool) -> list[Row]:
    queries = "wq_b" if query_latent else "wq"
    heads = {
        "gather": False,
        "queries": queries,
        "keys_values": ("wkv_b",),
        "head_dim": "query_dim",
        "kv_head_dim": "up_dim",
        "per_head": (),
    }
    rows: list[Row] = [(place, "attention_heads", heads)]
    if query_latent:
        rows += [(f"{every}.wq_a", "sequence", {"gather": True}), (f"{every}.q_norm", "sequence", {}), (f"{every}.wq_b", "column", {})]
    else:
        rows += [(f"{every}.wq", "column", {"gather": True})]
    return [
        *rows,
        (f"{every}.wkv_a", "sequence", {"gather": True}),
        (f"{every}.kv_norm", "sequence", {}),
        (f"{every}.wkv_b", "column", {}),
        (f"{every}.wo", "row", {}),
    ]
