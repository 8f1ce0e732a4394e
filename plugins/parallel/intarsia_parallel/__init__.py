"""Declared sharding: a family's table gives its modules roles, and this distribution gives roles their meaning on a mesh."""

__version__ = "0.1.0.dev0"
