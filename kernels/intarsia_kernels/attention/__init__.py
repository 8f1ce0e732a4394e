"""Attention on what torch brings: scaled dot product attention, flex attention, variable-length flash attention."""
