"""Turns to tokens and back. Torch-free."""
