"""Qwen3.5: gated DeltaNet and gated attention, dense and with experts, images and video: debug, 0.8B, 2B, 4B, 9B, 27B, 35B-A3B, 122B-A10B, 397B-A17B."""

__version__ = "0.1.0.dev0"
