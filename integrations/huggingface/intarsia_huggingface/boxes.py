"""A box of one of our tensors, read from theirs: what a rule does to whole tensors (`rules`), done to as little of them as the box needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from intarsia.contracts import Box
from torch import Tensor

from intarsia_huggingface.rules import Row, to_ours

Read = Callable[[str, Box], Tensor]


def read_box(row: Row, index: int, box: Box, read: Read, sizes: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """`box` of our tensor `row.ours[index]`. `read(name, box)` reads a box of a tensor of theirs; `shapes` are ours; `sizes` the head counts."""
    first = row.theirs[0]
    if row.op == "transpose":
        return read(first, Box(box.start[::-1], box.size[::-1])).transpose(0, 1)
    if row.op == "stack":
        inner = Box(box.start[1:], box.size[1:])
        return torch.stack([read(name, inner) for name in row.theirs[box.start[0] : box.end[0]]])
    if row.op == "rope_half_to_pairs":
        # Pairs and halves of one head are permuted among each other: the whole heads that the box touches are read.
        heads = sizes[row.heads]
        head_rows = shapes[row.ours[0]][0] // heads
        head, end = box.start[0] // head_rows, -(-box.end[0] // head_rows)
        whole = Box((head * head_rows, *box.start[1:]), ((end - head) * head_rows, *box.size[1:]))
        (turned,) = to_ours(row, [read(first, whole)], {row.heads: end - head})
        return turned.narrow(0, box.start[0] - head * head_rows, box.size[0])
    if row.op.startswith("split:"):
        before = sum(shapes[name][0] for name in row.ours[:index])
        return read(first, Box((box.start[0] + before, *box.start[1:]), box.size))
    return read(first, box)
