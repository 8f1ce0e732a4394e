"""Which parameters Muon takes, and the matrices they are made of; pure integers, torch-free.

A two-dimensional parameter is a matrix, a three-dimensional one [E, M, N] a stack of E matrices. A declaration (`SplitConfig`) cuts matrices into
several side by side. Each is a box of its parameter; whatever a rank holds of a parameter, its matrices are found by their boxes.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence

from intarsia.errors import UsageError, did_you_mean
from intarsia.layout import Box, Region

from intarsia_optimizers.config import SplitConfig


def is_matrix(name: str, shape: Sequence[int], not_matrices: Sequence[str]) -> bool:
    """Whether Muon updates the parameter: two or three dimensions, and no part of its dotted name matches one of the globs."""
    parts = name.split(".")
    return len(shape) in (2, 3) and not any(fnmatch.fnmatchcase(part, glob) for glob in not_matrices for part in [*parts, name])


def find_split(name: str, splits: Sequence[SplitConfig]) -> SplitConfig | None:
    """The first declaration that matches."""
    return next((split for split in splits if any(fnmatch.fnmatchcase(name, glob) for glob in split.match)), None)


def unmatched(splits: Sequence[SplitConfig], names: Sequence[str]) -> list[str]:
    """The declarations' globs that match none of `names`."""
    return [glob for split in splits for glob in split.match if not any(fnmatch.fnmatchcase(name, glob) for name in names)]


def check_splits(splits: Sequence[SplitConfig], names: Sequence[str], elsewhere: Collection[str] = ()) -> None:
    """Raise UsageError for a declaration that says nothing, or too much, or has a glob that matches none of `names` and is not in `elsewhere`."""
    for number, split in enumerate(splits):
        said = [field for field in ("blocks", "head_dim", "sizes") if getattr(split, field)]
        if len(said) != 1:
            raise UsageError(
                f"optimizer.split.{number} ({', '.join(split.match)}) sets {' and '.join(said) or 'none'} of blocks, head_dim and sizes; set exactly one."
            )
        if min(split.blocks, split.head_dim, *split.sizes, 0) < 0 or 0 in split.sizes:
            raise UsageError(f"optimizer.split.{number} ({', '.join(split.match)}): numbers of rows and blocks must be positive.")
        for glob in unmatched([split], names):
            if glob not in elsewhere:
                raise UsageError(
                    f"optimizer.split.{number} matches {glob!r}, but no matrix that Muon updates is called so. {did_you_mean(glob, list(names))}"
                )


def matrices_of(name: str, shape: Sequence[int], split: SplitConfig | None) -> list[Box]:
    """The boxes of the parameter's matrices, in row-major order of their beginnings. Raises UsageError where the declaration does not divide the shape."""
    if not math.prod(shape):
        return []
    stack, (rows, columns) = tuple(shape[:-2]), shape[-2:]
    lengths = [columns if split is not None and split.columns else rows]
    if split is not None:
        lengths = _lengths(name, shape, split, lengths[0])
    found = []
    for index in range(stack[0] if stack else 1):
        position = 0
        for length in lengths:
            by_columns = split is not None and split.columns
            start = (0, position) if by_columns else (position, 0)
            size = (rows, length) if by_columns else (length, columns)
            found.append(Box(((index,) if stack else ()) + start, ((1,) if stack else ()) + size))
            position += length
    return found


def _lengths(name: str, shape: Sequence[int], split: SplitConfig, whole: int) -> list[int]:
    what = "columns" if split.columns else "rows"
    if split.sizes:
        if sum(split.sizes) != whole:
            raise UsageError(
                f"Muon: optimizer.split cuts {name!r} (shape {list(shape)}) into blocks of {', '.join(map(str, split.sizes))} {what}, together {sum(split.sizes)}, "
                f"but it has {whole}. Give the sizes of all its parts, in order."
            )
        return list(split.sizes)
    divisor = split.blocks or split.head_dim
    if whole % divisor:
        said = f"{divisor} equal blocks" if split.blocks else f"heads of {divisor} {what}"
        raise UsageError(
            f"Muon: optimizer.split cuts {name!r} (shape {list(shape)}) into {said}, but its {whole} {what} cannot be divided so. "
            "Give `sizes` for parts of different lengths, or another number."
        )
    length = whole // divisor if split.blocks else divisor
    return [length] * (whole // length)


def flops(box: Box, steps: int) -> float:
    """Floating-point operations of Newton-Schulz on the matrix `box`, on its Gram matrix with symmetric products: the long side is met twice, to make that and to apply the polynomial."""
    short, long = sorted(box.size[-2:])
    return float(3 * short * short * long + (4 * steps - 3) * short**3)


@dataclasses.dataclass(frozen=True)
class Stack:
    """`count` equal matrices that lie in a flat buffer at equal distances: element (i, r, c) is at `offset` + i `distance` + r `leading` + c."""

    count: int
    rows: int
    columns: int
    offset: int
    distance: int
    leading: int

    def part(self, first: int, count: int) -> Stack:
        """`count` of its matrices, from number `first` on."""
        return dataclasses.replace(self, count=count, offset=self.offset + first * self.distance)

    @property
    def numel(self) -> int:
        """Elements of all its matrices."""
        return self.count * self.rows * self.columns


def inside(region: Region, boxes: Sequence[Box]) -> Iterator[tuple[int, Box, int]]:
    """Which of `boxes` (ordered by their beginning) lie whole inside one box of `region`: (its number, the holder, where the holder begins in storage)."""
    starts = [box.start[0] for box in boxes]
    offset = 0
    for holder in region:
        for number in range(bisect_left(starts, holder.start[0]), bisect_left(starts, holder.end[0])):
            box = boxes[number]
            if all(a <= b for a, b in zip(holder.start, box.start, strict=True)) and all(
                a >= b for a, b in zip(holder.end, box.end, strict=True)
            ):
                yield number, holder, offset
        offset += holder.numel


def stacks_in(region: Region, boxes: Sequence[Box]) -> list[Stack]:
    """The matrices of `boxes` that are whole in `region`, as stacks in its storage."""
    found: list[Stack] = []
    for number, holder, base in inside(region, boxes):
        box = boxes[number]
        offset, stride = base, 1
        for dimension in reversed(range(len(box.start))):
            offset += (box.start[dimension] - holder.start[dimension]) * stride
            stride *= holder.size[dimension]
        rows, columns = box.size[-2:]
        last = found[-1] if found else None
        if last is not None and (last.rows, last.columns, last.leading) == (rows, columns, holder.size[-1]):
            distance = offset - last.offset - (last.count - 1) * last.distance
            if last.count == 1 or distance == last.distance:
                found[-1] = dataclasses.replace(last, count=last.count + 1, distance=distance)
                continue
        found.append(Stack(1, rows, columns, offset, 0, holder.size[-1]))
    return found
