"""The controller: rollouts, groups, rewards, lag and batches, on asyncio and without torch."""
