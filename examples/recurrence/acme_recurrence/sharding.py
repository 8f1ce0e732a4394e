"""Which role each module plays when the model is cut: module pattern to role. Torch-free."""

from __future__ import annotations

TABLE: tuple[tuple[str, str], ...] = (
    ("tok_embeddings", "vocab"),
    ("layers.*.attention_norm", "sequence"),
    # Every rank of tp runs whole mixers; context parallelism cuts their rows.
    ("layers.*.attention", "replicated"),
    ("layers.*.feed_forward_norm", "sequence"),
    ("layers.*.feed_forward", "region"),
    ("layers.*.feed_forward.w1", "column"),
    ("layers.*.feed_forward.w3", "column"),
    ("layers.*.feed_forward.w2", "row"),
    ("norm", "sequence"),
    ("head", "vocab"),
)
