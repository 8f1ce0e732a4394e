"""Which role each module plays when the model is cut: module pattern to role. Torch-free."""

from __future__ import annotations

TABLE: tuple[tuple[str, str], ...] = (
    ("tok_embeddings", "vocab"),
    # The gates are the block's own; like the norm they work on the rank's own tokens.
    ("layers.*", "sequence"),
    ("layers.*.attention_norm", "sequence"),
    ("layers.*.attention", "attention_heads"),
    ("layers.*.attention.wq", "column"),
    ("layers.*.attention.wk", "column"),
    ("layers.*.attention.wv", "column"),
    ("layers.*.attention.wo", "row"),
    ("layers.*.feed_forward", "region"),
    ("layers.*.feed_forward.w1", "column"),
    ("layers.*.feed_forward.w2", "row"),
    ("norm", "sequence"),
    ("head", "vocab"),
)
