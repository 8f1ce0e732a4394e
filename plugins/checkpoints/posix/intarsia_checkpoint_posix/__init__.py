"""Checkpoints as files on a local or network file system."""

__version__ = "0.1.0.dev0"
