"""Which role each module plays when the model is cut: module pattern to role. The parallel plugins give roles their meaning. Torch-free."""

from __future__ import annotations

TABLE: tuple[tuple[str, str], ...] = (
    ("tok_embeddings", "vocab"),
    ("layers.*.attention_norm", "sequence"),
    ("layers.*.attention", "attention_heads"),
    ("layers.*.attention.wq", "column"),
    ("layers.*.attention.wk", "column"),
    ("layers.*.attention.wv", "column"),
    ("layers.*.attention.wo", "row"),
    ("layers.*.feed_forward_norm", "sequence"),
    ("layers.*.feed_forward.w1", "column"),
    ("layers.*.feed_forward.w3", "column"),
    ("layers.*.feed_forward.w2", "row"),
    ("norm", "sequence"),
    ("head", "vocab"),
)
"""column: cut the outputs; row: cut the inputs, outputs are summed; vocab: cut the vocabulary; attention_heads: whole heads stay together;
sequence: replicated, with gradients summed over the region in which activations are cut along the sequence."""
