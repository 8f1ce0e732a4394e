"""The renderer `template` of reinforcement learning. Needs `intarsia-rl`; nothing else here does."""
