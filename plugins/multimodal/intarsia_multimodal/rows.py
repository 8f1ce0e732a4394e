"""Which documents a row is made of: a pure function of lengths, budgets, seed and settings. Whole documents; no row has more tokens or patches than its budget.

Documents, in an order shuffled once, fill rows; the rows are shuffled anew in each epoch. So how many rows an epoch has does not depend on its number, and a position
says by arithmetic what was seen.
"""

from __future__ import annotations

import numpy
from intarsia.errors import UsageError
from intarsia_data.order import key_of, mix, scatter


def pack(lengths: numpy.ndarray, patches: numpy.ndarray, row: int, budget: int, open_rows: int) -> list[list[int]]:
    """Places of documents, row by row. A document goes into the first open row in which it fits, else into a new one; with more than `open_rows` open ones the oldest is
    done, as is a full one. O(documents * open_rows)."""
    done: list[list[int]] = []
    tokens_left: list[int] = []
    patches_left: list[int] = []
    filled: list[list[int]] = []

    def close(number: int) -> None:
        done.append(filled.pop(number))
        del tokens_left[number], patches_left[number]

    for place, (length, count) in enumerate(zip(lengths.tolist(), patches.tolist(), strict=True)):
        for number, left in enumerate(tokens_left):
            if length <= left and count <= patches_left[number]:
                break
        else:
            number = len(filled)
            tokens_left.append(row)
            patches_left.append(budget)
            filled.append([])
        tokens_left[number] -= length
        patches_left[number] -= count
        filled[number].append(place)
        if not tokens_left[number]:
            close(number)
        elif len(filled) > open_rows:
            close(0)
    return done + filled


class RowStream:
    """One source as rows, in sample order. `samples` is how many there are in `epochs` epochs, None where epochs is None."""

    cut_tokens = 0

    def __init__(
        self, lengths: numpy.ndarray, patches: numpy.ndarray, documents: numpy.ndarray, name: str, *,
        row: int, budget: int, packing: str, key: int | None, epochs: int | None, open_rows: int,
    ):  # fmt: skip
        if not len(documents):
            raise UsageError(f"{name}: none of its documents is left: all are empty, too long, or have media that cannot be used.")
        order = documents if key is None else documents[numpy.argsort(mix(documents, key_of(key, "documents")), kind="stable")]
        one_each = packing == "one_per_row"
        places = [[place] for place in range(len(order))] if one_each else pack(lengths[order], patches[order], row, budget, open_rows)
        self._ends = numpy.cumsum([len(each) for each in places])
        self._order = order[numpy.concatenate(places)]
        self._key, self._epochs, self.rows, self.documents = key, epochs, len(places), len(documents)
        self.tokens, self.patches = int(lengths[documents].sum()), int(patches[documents].sum())
        self.tokens_per_sample = self.tokens / self.rows
        self.samples = None if epochs is None else epochs * self.rows

    def numbers(self, sample: int) -> list[int]:
        """The documents of sample `sample`, in order."""
        epoch, number = divmod(sample, self.rows)
        if self._key is not None:
            number = scatter(number, self.rows, key_of(self._key, epoch, "rows"))
        return self._order[self._ends[number - 1] if number else 0 : self._ends[number]].tolist()

    def consumed(self, samples: int) -> tuple[float, float]:
        """Tokens in the first `samples` samples (within an epoch: on average), and how many epochs that is."""
        return samples * self.tokens / self.rows, samples / self.rows
