"""Checkpoint export and import: native copies and plain safetensors."""

__version__ = "0.1.0.dev0"
