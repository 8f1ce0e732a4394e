"""Which bytes a rank copies from which peer, and in which order: pure integers, torch-free.

Every rank pulls. In step k of a gather rank r reads from rank (r + k) mod n, so that at any time each rank is read by one other: no link is
asked twice while another idles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate


@dataclasses.dataclass(frozen=True)
class Copy:
    """`size` bytes that begin at byte `source` of what rank `peer` provides go to byte `destination` of what this rank fills."""

    peer: int
    source: int
    destination: int
    size: int


def turns(rank: int, ranks: int) -> list[int]:
    """The other ranks in the order in which `rank` reads from them."""
    return [(rank + step) % ranks for step in range(1, ranks)]


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each part begins when they lie one after the other."""
    return [0, *accumulate(sizes)][: len(sizes)]


def gather_copies(rank: int, sizes: Sequence[int]) -> tuple[Copy, ...]:
    """Copies by which `rank` completes a gather: each peer's part, from that part's first byte to its place among all parts in rank order.

    `sizes[r]` is the size of rank r's part in bytes; empty parts are not copied, nor is the rank's own.
    """
    places = starts(sizes)
    return tuple(Copy(peer, 0, places[peer], sizes[peer]) for peer in turns(rank, len(sizes)) if sizes[peer])


def exchange_copies(rank: int, sizes: Sequence[int]) -> tuple[Copy, ...]:
    """Copies by which `rank` collects the peers' contributions to its own part of a buffer that every rank holds whole.

    `sizes[r]` is the size of rank r's part in bytes, the same list on every rank. The contributions lie one after the other in rank order, this
    rank's own left out: `sizes[rank]` bytes for each peer.
    """
    size, begin = sizes[rank], starts(sizes)[rank]
    return tuple(Copy(peer, begin, received_at(rank, peer) * size, size) for peer in turns(rank, len(sizes)) if size)


def received_at(rank: int, peer: int) -> int:
    """The place of `peer`'s contribution among those that `rank` receives."""
    return peer - (peer > rank)
