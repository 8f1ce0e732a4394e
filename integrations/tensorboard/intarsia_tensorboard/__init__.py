"""TensorBoard as a metric sink."""

__version__ = "0.1.0.dev0"
