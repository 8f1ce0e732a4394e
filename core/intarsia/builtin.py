"""What core itself offers, through the same door as everybody else."""

from __future__ import annotations

INTARSIA_API = 1
