"""The stream checkpoint backend: one append-only file for each rank."""

__version__ = "0.1.0.dev0"
