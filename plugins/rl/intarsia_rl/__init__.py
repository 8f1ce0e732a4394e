"""Reinforcement learning: contracts of generators and algorithms, asynchronous rollouts, the policy loss, batch-invariant mode."""

__version__ = "0.1.0.dev0"
