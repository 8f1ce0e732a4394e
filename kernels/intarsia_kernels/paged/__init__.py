"""Attention that reads the generator's caches by their tables, in Triton."""
