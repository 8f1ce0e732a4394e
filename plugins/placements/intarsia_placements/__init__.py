"""Placements: row, column, flat, owned, block, replicate, mixed."""

__version__ = "0.1.0.dev0"
