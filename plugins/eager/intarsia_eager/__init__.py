"""Runs a model as it is written: the eager engine, next-token cross-entropy, and parameters kept whole."""

__version__ = "0.1.0.dev0"
