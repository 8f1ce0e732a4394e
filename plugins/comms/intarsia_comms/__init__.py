"""Transports: how gathers and reductions move between the GPUs of one host."""

__version__ = "0.1.0.dev0"
