"""Qwen3: dense from 0.6B to 32B, and with experts, 30B-A3B and 235B-A22B."""

__version__ = "0.1.0.dev0"
