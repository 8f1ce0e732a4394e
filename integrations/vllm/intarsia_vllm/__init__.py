"""Every installed model family in the vLLM engine, and vLLM as a generator."""

__version__ = "0.1.0.dev0"
