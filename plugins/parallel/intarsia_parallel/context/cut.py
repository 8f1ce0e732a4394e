"""Which tokens of a row each rank holds: whole numbers only, the same for every row of a batch."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from intarsia.errors import PluginError, UsageError, did_you_mean
from torch import Tensor

from intarsia_parallel.collectives import even_counts

if TYPE_CHECKING:
    from intarsia.contracts import Batch

Ranges = tuple[tuple[int, int], ...]
"""Half-open, ascending, none empty, no two touching."""

Method = Literal["zigzag", "contiguous"]
METHODS: tuple[Method, ...] = ("zigzag", "contiguous")

_AnyBatch = TypeVar("_AnyBatch", bound="Batch")
_SUFFIX = re.compile(r"_((?:\d+|[A-Za-z])+)$")


def merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """The union of ranges."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return tuple(result)


def intersected(one: Ranges, other: Ranges) -> Ranges:
    """What both contain."""
    return merged([(max(a, c), min(b, d)) for a, b in one for c, d in other])


def length(ranges: Ranges) -> int:
    """How many indices."""
    return sum(stop - start for start, stop in ranges)


@dataclasses.dataclass(frozen=True)
class SequenceCut:
    """A row of `tokens` tokens shared out: rank r holds the indices of `ranges[r]`, in ascending order. Stability: provisional.

    Every index belongs to exactly one rank; a rank may hold none. Positions, documents and labels are cut after they were made for the whole row, so that
    what depends on positions sees the true ones.
    """

    tokens: int
    ranges: tuple[Ranges, ...]

    def __post_init__(self) -> None:
        whole = sorted(each for ranges in self.ranges for each in ranges)
        ends = [0, *(stop for _, stop in whole)]
        if any(start != end or start >= stop for (start, stop), end in zip(whole, ends, strict=False)) or ends[-1] != self.tokens:
            raise PluginError(f"A cut of {self.tokens} tokens over {len(self.ranges)} ranks must hold each index once: {self.ranges}.")
        if any(ranges != merged(ranges) for ranges in self.ranges):
            raise PluginError(f"A cut's ranges must ascend and not touch: {self.ranges}.")

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, tokens: int, ranks: int, method: str = "zigzag") -> SequenceCut:
        """`contiguous`: one piece for each rank, in rank order. `zigzag`: 2 * ranks pieces, of which rank r holds number r from the front and number r
        from the back, so that under a causal mask all ranks have the same work. Pieces are as even as can be: where tokens do not divide, earlier
        pieces have one more, and short rows leave some empty. Raises UsageError for an unknown method, or fewer than one rank or token."""
        if ranks < 1 or tokens < 0:
            raise UsageError(f"A row of {tokens} tokens cannot be cut over {ranks} ranks.")
        if method not in METHODS:
            raise UsageError(f"There is no cut of the sequence called {method!r}. {did_you_mean(method, METHODS)}")
        counts = even_counts(tokens, ranks if method == "contiguous" else 2 * ranks)
        stops = [sum(counts[: i + 1]) for i in range(len(counts))]
        pieces = [(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
        if method == "contiguous":
            return cls(tokens, tuple(merged([piece]) for piece in pieces))
        return cls(tokens, tuple(merged([pieces[r], pieces[2 * ranks - 1 - r]]) for r in range(ranks)))

    @property
    def ranks(self) -> int:
        """Over how many ranks."""
        return len(self.ranges)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        return tuple(length(ranges) for ranges in self.ranges)

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether the parts one after the other, in rank order, are the row."""
        held = [each for ranges in self.ranges for each in ranges]
        return held == sorted(held)

    def indices(self, rank: int) -> list[int]:
        """The indices that a rank holds, in the order in which it holds them."""
        return [index for start, stop in self.ranges[rank] for index in range(start, stop)]

    def take(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's part of a tensor that has the whole row along `dim`."""
        if x.shape[dim] != self.tokens:
            raise PluginError(
                f"A tensor of shape {tuple(x.shape)} has {x.shape[dim]} tokens along dimension {dim}; the cut is of {self.tokens}."
            )
        return slices(x, self.ranges[rank], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """All ranks' parts, by rank, as the whole row along `dim`."""
        pieces: list[tuple[int, Tensor]] = []
        for ranges, part in zip(self.ranges, parts, strict=True):
            split = part.split([stop - start for start, stop in ranges], dim) if ranges else ()
            pieces += [(start, piece) for (start, _), piece in zip(ranges, split, strict=True)]
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda each: each[0])], dim) if pieces else parts[0]

    def local(self, batch: _AnyBatch, rank: int) -> _AnyBatch:
        """A rank's part of a batch. Every tensor of the batch and of `batch.extra` (in mappings and sequences in it, too) is cut along the dimension that
        its name's shape suffix calls S (`tokens_BS`, `positions_3BS`); tensors without one stay whole. `lengths` stay the whole row's: masks are planned
        from them. Raises PluginError where a name's suffix and its tensor's shape disagree."""
        named = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        changed = {name: self._cut(value, name, rank) for name, value in named.items() if isinstance(value, Tensor)}
        extra = {name: self._cut(value, name, rank) for name, value in batch.extra.items()}
        return dataclasses.replace(batch, **changed, extra=extra)

    def _cut(self, value: Any, name: str, rank: int) -> Any:
        if isinstance(value, dict):
            return {key: self._cut(each, str(key), rank) for key, each in value.items()}
        if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
            return type(value)([self._cut(each, name, rank) for each in value])
        dim = sequence_dim(name) if isinstance(value, Tensor) else None
        if dim is None:
            return value
        dims = len(dimensions(name))
        if value.ndim != dims or value.shape[dim] != self.tokens:
            raise PluginError(
                f"Batch tensor {name!r} has shape {tuple(value.shape)}, but its name says {dims} dimensions with the {self.tokens} tokens of a row "
                f"along dimension {dim}. Rename it, or make its shape what its name says."
            )
        return self.take(value, rank, dim)


def dimensions(name: str) -> list[str]:
    """The dimensions that a name's shape suffix tells (`positions_3BS`: 3, B, S); none where it has no suffix with a capital letter."""
    match = _SUFFIX.search(name)
    if match is None or match[1] == match[1].lower():
        return []
    return re.findall(r"\d+|[A-Za-z]", match[1])


def sequence_dim(name: str) -> int | None:
    """Which dimension is the sequence's, by a tensor's name; None where there is none."""
    dims = dimensions(name)
    return dims.index("S") if "S" in dims else None


def slices(x: Tensor, ranges: Ranges, dim: int) -> Tensor:
    """The parts of `x` within ranges of `dim`, one after the other; a view where there is one range."""
    if len(ranges) == 1:
        return x.narrow(dim, ranges[0][0], ranges[0][1] - ranges[0][0])
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in ranges], dim) if ranges else x.narrow(dim, 0, 0)
