"""Matrices as float8 with one scale for each tile."""

__version__ = "0.1.0.dev0"
