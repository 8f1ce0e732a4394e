"""Runs in the terminal: live progress, and `intarsia show`."""

__version__ = "0.1.0.dev0"
