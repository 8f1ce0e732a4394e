"""Batch-invariant mode: trainer and generator give equal log-probabilities, bit for bit."""
