"""Checkpoints in one SQLite file."""
