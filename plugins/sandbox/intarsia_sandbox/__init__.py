"""Running code that nobody trusts: the contract of sandboxes, and one of Linux namespaces."""

__version__ = "0.1.0.dev0"
