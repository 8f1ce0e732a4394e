"""Hugging Face model folders, tokenizers and data sets."""

__version__ = "0.1.0.dev0"
