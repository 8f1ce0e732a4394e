"""Kernels for mixtures of experts: rows to experts and back, gated activations, grouped products, router logits."""
