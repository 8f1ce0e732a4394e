"""Seeds and order as functions of what they are for: nothing depends on what else was drawn before."""

from __future__ import annotations

import functools
import hashlib
import json
import random


def seed_of(*parts: int | str) -> int:
    """A number below 2**62."""
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8], "little") >> 2


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed_of("order", seed, epoch)).shuffle(order)
    return tuple(order)


def task_index(seed: int, number: int, count: int) -> int:
    """Which of `count` tasks group `number` tries: every task once in an epoch, in an order of the epoch's own."""
    return _order(seed, number // count, count)[number % count]
