"""Kernels for the operator `linear`."""
