"""Llama 3: debug, 1B, 3B, 8B, 70B, 405B."""

__version__ = "0.1.0.dev0"
