"""The plain values that recipes, run directories and checkpoints hold."""

from __future__ import annotations

# A plain leaf value, as it is written into JSON.
Choice = bool | int | float | str | None
