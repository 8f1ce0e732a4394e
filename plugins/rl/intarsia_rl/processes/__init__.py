"""Processes: starting them, calling them, keeping them alive; generators and environments that run in them. Torch-free."""
