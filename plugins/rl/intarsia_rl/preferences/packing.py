"""Where the documents of pairs lie: whole numbers only. The two documents of a pair are always in one micro-batch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

Place = tuple[int, int]
"""(number of the pair in the step, side): side 0 is chosen, 1 rejected."""

Rows = list[list[Place]]


@dataclasses.dataclass
class _Open:
    """A micro-batch that is being filled: its rows, and what is left of each."""

    rows: Rows
    room: list[int]

    def takes(self, lengths: tuple[int, int]) -> tuple[int, int] | None:
        """The first rows that have room for both documents; None where there are none."""
        room, found = list(self.room), []
        for length in lengths:
            row = next((row for row, left in enumerate(room) if left >= length), None)
            if row is None:
                return None
            room[row] -= length
            found.append(row)
        return found[0], found[1]

    def put(self, pair: int, lengths: tuple[int, int], rows: tuple[int, int]) -> None:
        for side, row in enumerate(rows):
            self.rows[row].append((pair, side))
            self.room[row] -= lengths[side]


def micro_batches(pairs: Sequence[tuple[int, tuple[int, int]]], size: int, rows: int) -> list[Rows]:
    """Micro-batches of `rows` rows of `size` tokens for pairs (number, lengths), in order: each into the last one that was begun where that has room. Every pair must fit into an
    empty one."""
    made: list[_Open] = []
    for number, lengths in pairs:
        fits = made[-1].takes(lengths) if made else None
        if fits is None:
            made.append(_Open([[] for _ in range(rows)], [size] * rows))
            fits = made[-1].takes(lengths)
            assert fits is not None, f"a pair of {lengths} tokens does not fit into {rows} rows of {size}"
        made[-1].put(number, lengths, fits)
    return [each.rows for each in made]


def step(lengths: Sequence[tuple[int, int]], size: int, rows: int, ranks: int) -> list[list[Rows]]:
    """Of a step's pairs, given by their lengths, each rank's micro-batches: contiguous shares, as even as can be; the same number on every rank, at least one, the last ones of some
    being empty. Pure: every rank knows them all."""
    edges = [len(lengths) * edge // ranks for edge in range(ranks + 1)]
    made = [
        micro_batches([(number, lengths[number]) for number in range(first, last)], size, rows) for first, last in itertools.pairwise(edges)
    ]
    most = max(1, *(len(each) for each in made))
    return [each + [[[] for _ in range(rows)]] * (most - len(each)) for each in made]
