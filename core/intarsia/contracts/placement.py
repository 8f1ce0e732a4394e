"""How a bucket of tensors is cut over ranks: the value types and the one method that a placement has. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

# Members of a bucket's local buffer start at multiples of this: Inductor copies views that are not aligned.
ALIGNMENT_BYTES = 128


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Box:
    """A hyper-rectangle in a tensor's index space: `start[i] <= index[i] < start[i] + size[i]`. Stability: stable."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box; 1 for a rank-0 tensor."""
        return math.prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index in every dimension."""
        return tuple(a + n for a, n in zip(self.start, self.size, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when it would have no element."""
        start = tuple(map(max, self.start, other.start))
        end = tuple(map(min, self.end, other.end))
        size = tuple(b - a for a, b in zip(start, end, strict=True))
        return Box(start, size) if all(n > 0 for n in size) else None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))


# Ordered, disjoint, non-empty boxes. Local storage order is the boxes in order, each row-major.
Region = tuple[Box, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One tensor of a bucket, as a placement sees it. Stability: stable.

    `dtype` is a torch dtype's name (`"float32"`). `tile` is the block that must not be cut (one size for each dimension; edge
    tiles may be short), or None. `cost` is what owning the member costs, in arbitrary units that are comparable within a
    bucket (FLOPs of its update, say); 0 means unknown, and the number of elements is taken.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    tile: tuple[int, ...] | None = None
    cost: float = 0.0

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """A placement's answer: for each member and rank the region that this rank stores. Stability: stable.

    `regions[m][r]` belongs to `members[m]` on rank r. Unless `replicated`, the regions of one member are disjoint over ranks
    and cover it; if `replicated`, every rank stores every member whole and rank 0's copy is primary.
    """

    members: tuple[Member, ...]
    ranks: int
    regions: tuple[tuple[Region, ...], ...]
    replicated: bool = False


@runtime_checkable
class Placement(Protocol):
    """Cuts buckets. The whole contract; everything else (transfers, checkpoints, norms) follows from the boxes. Stability: stable.

    `name` is how messages call it, arguments included (`row(dim=1)`). `accepts` says what it can cut: `"box"`, only tensors that
    are one box (a whole tensor, or a rectangular piece of one), or `"region"`, any piece that an outer cut left behind, which
    it then sees as a 1-D member in storage order. A placement whose answers follow from the members' order, shapes, tiles and costs alone, and
    not from their names, may say so by an attribute `by_shape = True`: of equal blocks a plan then asks it once.
    """

    name: str
    accepts: Literal["box", "region"]

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """Cut `members` over `ranks` >= 1 ranks. Deterministic and pure: no torch, no process group, no clock.

        A member may have any rank, sizes of 0, and fewer elements than ranks; empty regions are ordinary. Raises UsageError, naming
        the member, where it cannot cut.
        """
