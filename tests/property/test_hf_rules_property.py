"""Chains of ops on random tensors: there and back is the identity, and a box, read or written, is a slice of the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from intarsia.contracts import Box, HFRule, HFTable
from intarsia_huggingface.boxes import read_box, write_box
from intarsia_huggingface.ops import check
from intarsia_huggingface.rules import Row, expand, to_ours, to_theirs
from torch import Tensor

SIZES = {"heads": 3, "inner.c": 2, "e": 3}
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A rule with one row, and shapes of ours that go with it."""

    row: Row
    shapes: dict[str, Shape]


@st.composite
def rules(draw: st.DrawFn) -> Drawn:
    """Chains of up to four ops, built from their end: whatever shapes ours have, theirs follow."""
    columns = draw(st.sampled_from((4, 6)))
    stack = draw(st.booleans())
    split = draw(st.sampled_from(("", "split:2@1") if stack else ("", "split:2", "split:3", "split:2@1", "split_heads:2")))
    parts = int(split[split.index(":") + 1]) if split else 1
    grown = draw(st.integers(0, 2))
    if stack:
        ours = [(3, 6 + (grown * number if split else 0), columns) for number in range(parts)]
    elif split == "split:2@1":
        ours = [(6, columns + grown * number) for number in range(parts)]
    else:
        ours = [(6 + (6 * grown * number if split.startswith("split:") else 0), columns) for number in range(parts)]
    before, after = draw(st.lists(st.sampled_from(("transpose", "same")), max_size=1)), []
    if not split:
        after = draw(st.lists(st.sampled_from(("transpose", "same") if stack else ("transpose", "same", "rope_half_to_pairs")), max_size=2))
        if "rope_half_to_pairs" in after:
            after.append("same")  # its rows are those of ours
            after.remove("transpose") if "transpose" in after else None
        elif not stack and draw(st.booleans()):
            before, after = [f"flatten:inner.c,{draw(st.sampled_from(('*', str(columns // 2))))}"], ["same"]
    op = "|".join([*before, *(["stack"] if stack else []), *([split] if split else []), *after]) or "same"
    heads = "heads" if "heads" in op or "rope" in op else ""
    names = tuple(f"ours{number}" for number in range(parts))
    rule = HFRule("theirs.{e}" if stack else "theirs", names if parts > 1 else names[0], op, heads)
    check(rule)
    (row,) = expand(HFTable(rules=(rule,), config_to_ours="x:y", config_to_theirs="x:z"), 1, 3, sizes=SIZES)
    return Drawn(row, dict(zip(names, ours, strict=True)))


def boxes(draw: st.DrawFn, shape: Shape) -> Box:
    spans = []
    for size in shape:
        start = draw(st.integers(0, size))
        spans.append((start, draw(st.integers(0, size - start))))
    return Box(tuple(start for start, _ in spans), tuple(size for _, size in spans))


def part(x: Tensor, box: Box) -> Tensor:
    return x[tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))]


def numbered(shapes: Sequence[Shape]) -> list[Tensor]:
    """No two elements are equal."""
    made, first = [], 0
    for shape in shapes:
        count = torch.Size(shape).numel()
        made.append(torch.arange(first, first + count).view(shape))
        first += count
    return made


@settings(max_examples=400, deadline=None)
@given(drawn=rules(), data=st.data())
def test_there_and_back_and_in_boxes(drawn: Drawn, data: st.DataObject) -> None:
    row, shapes = drawn.row, drawn.shapes
    ours = numbered([shapes[name] for name in row.ours])
    theirs = to_theirs(row, ours, SIZES)
    assert len(theirs) == len(row.theirs)
    assert sorted(torch.cat([x.flatten() for x in theirs]).tolist()) == list(range(sum(x.numel() for x in ours)))
    back = to_ours(row, theirs, SIZES, shapes)
    assert all(torch.equal(one, other) for one, other in zip(back, ours, strict=True)), row.op
    known = dict(zip(row.theirs, theirs, strict=True)) | dict(zip(row.ours, ours, strict=True))

    def read(name: str, box: Box) -> Tensor:
        found = part(known[name], box)
        assert tuple(found.shape) == box.size, "read beyond the tensor's end"
        return found

    index = data.draw(st.integers(0, len(ours) - 1))
    box = boxes(data.draw, tuple(ours[index].shape))
    assert torch.equal(read_box(row, index, box, read, SIZES, shapes), part(ours[index], box)), (row.op, box)
    index = data.draw(st.integers(0, len(theirs) - 1))
    box = boxes(data.draw, tuple(theirs[index].shape))
    assert torch.equal(write_box(row, index, box, read, SIZES, shapes), part(theirs[index], box)), (row.op, box)
