"""`intarsia rl parity`: that trainer and generator agree bit for bit is shown on the recipe's own model."""
