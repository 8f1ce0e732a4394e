"""Optimizers: AdamW, Adam, Lion, SGD, and Muon with AdamW for the rest."""

__version__ = "0.1.0.dev0"
