"""A model family that mixes a gated linear recurrence with attention, and whose rows can be cut over ranks."""
