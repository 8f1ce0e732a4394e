"""Kernels for optimizers and for what sharded training does to gradients: AdamW, sums of contributions, Newton-Schulz."""
