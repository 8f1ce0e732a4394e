"""Building blocks that model families share."""

__version__ = "0.1.0.dev0"
