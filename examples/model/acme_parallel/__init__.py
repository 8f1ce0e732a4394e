"""A model family of parallel gated blocks, and a feed-forward layer that any family can use."""
