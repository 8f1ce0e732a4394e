"""Qwen3-VL: dense and with experts, images and video: debug, 2B, 4B, 8B, 32B, 30B-A3B, 235B-A22B."""

__version__ = "0.1.0.dev0"
