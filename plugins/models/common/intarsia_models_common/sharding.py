"""Rows of a sharding table for the parts of a block, for the tables of families. Torch-free."""

from __future__ import annotations

from typing import Any

from intarsia_models_common.config import FeedForwardConfig, SwiGLUConfig
from intarsia_models_common.moe.config import GatedSwiGLUConfig, MoEConfig

Row = tuple[str, str, dict[str, Any]]


def norm_rows(block: str) -> list[Row]:
    """The two norms of the block at `block` work on the rank's own tokens."""
    return [(f"{block}.{name}", "sequence", {}) for name in ("attention_norm", "feed_forward_norm")]


def attention_rows(place: str, *, gate: bool = False) -> list[Row]:
    """Grouped-query attention at `place` is cut by heads. A norm over a query or key head is one for all heads: every rank has it, with its own heads' share of the gradient."""
    columns = ("wq", "wk", "wv", *(("wg",) if gate else ()))
    return [(place, "attention_heads", {}), *((f"{place}.{name}", "column", {}) for name in columns), (f"{place}.wo", "row", {})]


def feed_forward_rows(place: str, config: FeedForwardConfig) -> list[Row]:
    """A SwiGLU at `place` is cut by columns, then rows. Of a mixture the routed experts are dealt out; shared ones are whole and work on the rank's own tokens, as routed ones do.
    Another's component has no rows here."""
    if isinstance(config, SwiGLUConfig):
        parts = (("w1", "column"), ("w3", "column"), ("w2", "row"))
        return [(place, "region", {}), *((f"{place}.{name}", role, {}) for name, role in parts)]
    if not isinstance(config, MoEConfig):
        return []
    shared = ("w1", "w3", "w2") if isinstance(config.shared, SwiGLUConfig) else ()
    gate = ("gate",) if isinstance(config.shared, GatedSwiGLUConfig) else ()
    return [
        (f"{place}.router", "sequence", {}),
        (f"{place}.experts", "expert", {}),
        *((f"{place}.shared.{name}", "sequence", {}) for name in (*shared, *gate)),
    ]
