"""First environments for reinforcement learning: arithmetic, sorting names, writing functions."""

__version__ = "0.1.0.dev0"
