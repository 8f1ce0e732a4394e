"""A box of one of our tensors, read from theirs, and of theirs from ours: what a rule does to whole tensors (`ops`), done to as little of them as the box needs.

A box of a stage's tensor is made of boxes of the stage before it (on import), or behind it (on export).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from intarsia.contracts import Box
from torch import Tensor

from intarsia_huggingface.ops import Chain, Shape, Step
from intarsia_huggingface.rules import Row, chain_of

Read = Callable[[str, Box], Tensor]


def read_box(row: Row, index: int, box: Box, read: Read, sizes: Mapping[str, int], shapes: Mapping[str, Shape]) -> Tensor:
    """`box` of our tensor `row.ours[index]`. `read(name, box)` reads a box of a tensor of theirs; `shapes` are ours; `sizes` the config's whole numbers."""
    path = _path(row, read, row.theirs, sizes, shapes)
    return path.imported(len(path.chain.steps), index, box)


def write_box(row: Row, index: int, box: Box, read: Read, sizes: Mapping[str, int], shapes: Mapping[str, Shape]) -> Tensor:
    """`box` of their tensor `row.theirs[index]`. `read(name, box)` reads a box of a tensor of ours."""
    return _path(row, read, row.ours, sizes, shapes).exported(0, index, box)


def _path(row: Row, read: Read, names: tuple[str, ...], sizes: Mapping[str, int], shapes: Mapping[str, Shape]) -> _Path:
    chain = chain_of(row, sizes)
    return _Path(chain, read, names, chain.shapes([shapes[name] for name in row.ours], len(row.theirs)))


@dataclasses.dataclass(frozen=True)
class _Path:
    """`names` are those of the end that is read; `stages` the whole shapes of every stage's tensors."""

    chain: Chain
    read: Read
    names: tuple[str, ...]
    stages: list[list[Shape]]

    # ------------------------------------------------------------ import

    def imported(self, stage: int, index: int, box: Box) -> Tensor:
        """`box` of tensor `index` of a stage, from the stage before it."""
        if stage == 0:
            return self.read(self.names[index], box)
        step, shape = self.chain.steps[stage - 1], self.stages[stage][index]

        def before(number: int, part: Box) -> Tensor:
            return self.imported(stage - 1, number, part)

        if step.kind == "stack":
            return _stacked(box, before)
        if step.kind == "split":
            first = sum(each[step.dim] for each in self.stages[stage][:index])
            return before(0, _moved(box, step.dim, first))
        if step.kind == "split_heads":
            rows = shape[0] // self.chain.number(self.chain.heads)
            return _joined([before(0, _rows(box, first, count)) for first, count in _apart(box, rows, step.parts, index)])
        if step.kind == "transpose":
            return before(index, _turned(box)).transpose(-2, -1)
        if step.kind == "flatten":
            whole = self._inner(step, box, shape)
            return before(index, whole).flatten(1).narrow(1, box.start[1], box.size[1])
        if step.kind == "rope_half_to_pairs":
            return self._heads(box, shape, lambda part: before(index, part), lambda x, heads: x.unflatten(0, (heads, 2, -1)))
        return before(index, box)

    # ------------------------------------------------------------ export

    def exported(self, stage: int, index: int, box: Box) -> Tensor:
        """`box` of tensor `index` of a stage, from the stage behind it."""
        if stage == len(self.chain.steps):
            return self.read(self.names[index], box)
        step, shape = self.chain.steps[stage], self.stages[stage][index]

        def behind(number: int, part: Box) -> Tensor:
            return self.exported(stage + 1, number, part)

        if step.kind == "stack":
            return behind(0, Box((index, *box.start), (1, *box.size)))[0]
        if step.kind == "split":
            return self._split(step, box, self.stages[stage + 1], behind)
        if step.kind == "split_heads":
            return self._split_heads(step, box, shape, behind)
        if step.kind == "transpose":
            return behind(index, _turned(box)).transpose(-2, -1)
        if step.kind == "flatten":
            columns = self.stages[stage + 1][index][1]
            whole = behind(index, Box((box.start[0], 0), (box.size[0], columns))).unflatten(1, shape[1:])
            return _narrowed(whole, Box((0, *box.start[1:]), box.size))
        if step.kind == "rope_half_to_pairs":
            return self._heads(box, shape, lambda part: behind(index, part), lambda x, heads: x.unflatten(0, (heads, -1, 2)))
        return behind(index, box)

    def _split(self, step: Step, box: Box, parts: list[Shape], behind: Callable[[int, Box], Tensor]) -> Tensor:
        """The parts that a box meets, one after the other."""
        pieces, first = [], 0
        for number, shape in enumerate(parts):
            begin, end = max(box.start[step.dim], first), min(box.end[step.dim], first + shape[step.dim])
            if begin < end:
                part = _moved(box, step.dim, begin - first - box.start[step.dim])
                size = tuple(end - begin if dim == step.dim else length for dim, length in enumerate(box.size))
                pieces.append(behind(number, Box(part.start, size)))
            first += shape[step.dim]
        return torch.cat(pieces, step.dim) if pieces else behind(0, Box((0,) * len(box.size), box.size))

    def _split_heads(self, step: Step, box: Box, shape: Shape, behind: Callable[[int, Box], Tensor]) -> Tensor:
        """Rows of the heads' parts in turn."""
        rows = shape[0] // (self.chain.number(self.chain.heads) * step.parts)
        pieces, row = [], box.start[0]
        while row < box.end[0]:
            block, inside = divmod(row, rows)
            head, part = divmod(block, step.parts)
            count = min(rows - inside, box.end[0] - row)
            pieces.append(behind(part, _rows(box, head * rows + inside, count)))
            row += count
        return _joined(pieces or [behind(0, _rows(box, 0, 0))])

    # ------------------------------------------------------------ help

    def _inner(self, step: Step, box: Box, shape: Shape) -> Box:
        """Whole rows, with the dims that flatten joins."""
        inner = self.chain.inner(step, shape[1])
        return Box((box.start[0], *(0,) * len(inner)), (box.size[0], *inner))

    def _heads(self, box: Box, shape: Shape, read: Callable[[Box], Tensor], apart: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Pairs and halves of one head are permuted among each other: the whole heads that the box touches are read."""
        if not box.numel:
            return read(box)
        rows = shape[0] // self.chain.number(self.chain.heads)
        head, end = box.start[0] // rows, -(-box.end[0] // rows)
        turned = apart(read(_rows(box, head * rows, (end - head) * rows)), end - head).transpose(1, 2).flatten(0, 2)
        return turned.narrow(0, box.start[0] - head * rows, box.size[0])


def _stacked(box: Box, before: Callable[[int, Box], Tensor]) -> Tensor:
    inner = Box(box.start[1:], box.size[1:])
    if not box.size[0]:
        return before(0, Box(inner.start, (0,) * len(inner.size))).new_empty(box.size)
    return torch.stack([before(number, inner) for number in range(box.start[0], box.end[0])])


def _apart(box: Box, rows: int, parts: int, index: int) -> list[tuple[int, int]]:
    """Where the rows of a box of part `index` lie among the heads' parts in turn: (first row, how many), in order."""
    found, row = [], box.start[0]
    while row < box.end[0]:
        head, inside = divmod(row, rows)
        count = min(rows - inside, box.end[0] - row)
        found.append(((head * parts + index) * rows + inside, count))
        row += count
    return found or [(0, 0)]


def _rows(box: Box, first: int, count: int) -> Box:
    return Box((first, *box.start[1:]), (count, *box.size[1:]))


def _moved(box: Box, dim: int, by: int) -> Box:
    return Box(tuple(start + by if number == dim else start for number, start in enumerate(box.start)), box.size)


def _turned(box: Box) -> Box:
    start, size = box.start, box.size
    return Box((*start[:-2], start[-1], start[-2]), (*size[:-2], size[-1], size[-2]))


def _narrowed(x: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
        x = x.narrow(dim, start, size)
    return x


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
