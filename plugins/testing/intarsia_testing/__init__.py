"""The conformance kit: a pytest plugin that says which promise of a contract a plugin breaks."""

__version__ = "0.1.0.dev0"
