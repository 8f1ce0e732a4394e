"""Sizes of the embedded generator's caches and steps. Torch-free."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """As `LocalConfig` has them, with numbers for what is open there."""

    block: int
    blocks: int
    max_sequences: int
    max_batch_tokens: int
    max_tokens: int
    prefix_cache: bool = True
