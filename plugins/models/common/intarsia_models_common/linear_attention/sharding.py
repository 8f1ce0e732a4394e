"""Rows of a sharding table for a mixer `gated_delta_net`, for the tables of families. Torch-free."""

from __future__ import annotations

from intarsia_models_common.sharding import Row

# Value heads are what is shared out; a rank's value heads read its own key heads, with which the convolution's channels go.
_HEADS = {
    "queries": "wv",
    "keys_values": ("wq", "wk"),
    "head_dim": "value_dim",
    "kv_head_dim": "key_dim",
    "per_head": ("log_a", "dt_bias", "v_conv.weight", "wz.weight", "wb.weight", "wa.weight"),
    "per_kv_head": ("q_conv.weight", "k_conv.weight"),
}


def delta_rows(place: str) -> list[Row]:
    """The mixer at `place` is cut by key heads, each with the value heads that it serves: tp must divide their number. Its norm is whole on every rank, and its output projection sums."""
    columns: list[Row] = [(f"{place}.{name}", "column", {}) for name in ("wq", "wk", "wv", "wz", "wb", "wa")]
    return [(place, "attention_heads", dict(_HEADS)), *columns, (f"{place}.wo", "row", {})]
