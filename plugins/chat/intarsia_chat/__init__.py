"""Conversations and tools by chat templates: for fine-tuning, generation and reinforcement learning alike."""

__version__ = "0.1.0.dev0"
