"""Kernels whose results for a row do not depend on the batch around it, bit for bit."""
