"""Kernels for the operators of intarsia.ops, one entry point for each family."""

__version__ = "0.1.0.dev0"
