"""Text from a trained model: caches, sampling, the generate command."""

__version__ = "0.1.0.dev0"
