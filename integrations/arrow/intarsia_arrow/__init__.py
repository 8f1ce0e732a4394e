"""Parquet and Arrow files as data sources."""

__version__ = "0.1.0.dev0"
