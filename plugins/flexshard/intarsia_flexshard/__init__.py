"""Buckets of parameters, and the runtime that moves them."""

__version__ = "0.1.0.dev0"
