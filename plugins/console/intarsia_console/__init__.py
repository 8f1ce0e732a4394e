"""The terminal: recipes printed, runs of several processes started, live progress, and curves."""

__version__ = "0.1.0.dev0"
