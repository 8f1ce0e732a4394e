"""Layouts and transfers on plain values: tensors cut and joined, what a transfer means, the runs of bytes that it moves, and layouts read back from JSON. Torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from intarsia.errors import UsageError
from intarsia.layout import Box, Layout, Region, check_cover, region_numel, region_parts, slices
from intarsia_transfer import Move, Transfer


def pack(full: Any, region: Region, local: Any) -> None:
    """Copy `region` of a whole tensor into the 1-D buffer `local`, in storage order (torch or numpy)."""
    for box, view in region_parts(local, region, Box.whole(full.shape)):
        view[...] = full[slices(box)]


def unpack(local: Any, region: Region, full: Any) -> None:
    """The inverse of `pack`: copy the 1-D buffer `local` to where its region lies in the whole tensor."""
    for box, view in region_parts(local, region, Box.whole(full.shape)):
        full[slices(box)] = view


def simulate(plan: Transfer, buffers: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Carry out a transfer of all ranks in this process, on plain lists: what every other executor must agree with. Stability: provisional.

    `buffers[r]` are the elements that rank r of the source stores, in storage order; so are the lists that come back for the destination.
    Elements that nothing writes stay None.
    """
    for rank in range(plan.src.ranks):
        if len(buffers[rank]) != plan.src.numel(rank):
            raise UsageError(f"Rank {rank} stores {plan.src.numel(rank)} elements, the buffer has {len(buffers[rank])}.")
    results: list[list[Any]] = []
    for rank in range(plan.dst.ranks):
        result: list[Any] = [None] * region_numel(plan.dst.local(rank))
        for move in plan.receives(rank):
            for source, target, length in runs(move):
                there = slice(target, target + length)
                new = [0] * length if move.op == "zero" else buffers[move.source][source : source + length]
                if move.op == "sum":
                    result[there] = [a + b for a, b in zip(result[there], new, strict=True)]
                elif move.op == "max":
                    result[there] = list(map(max, result[there], new))
                else:
                    result[there] = new
        results.append(result)
    return results


def runs(move: Move) -> Iterator[tuple[int, int, int]]:
    """(source offset, destination offset, length) of the longest pieces that are contiguous in both local buffers, in order."""
    return box_runs(move.box, move.source_box, move.source_offset, move.destination_box, move.destination_offset)


def _strides(size: Sequence[int]) -> list[int]:
    return [math.prod(size[dimension + 1 :]) for dimension in range(len(size))]


def box_runs(box: Box, source: Box, source_offset: int, destination: Box, destination_offset: int) -> Iterator[tuple[int, int, int]]:
    """(source offset, destination offset, length) of the contiguous runs of `box`, which lies inside both `source` and `destination`.

    Each of these is stored row-major from its offset. Without a source or destination of interest give `box` itself with offset 0. Stability: stable.
    """
    inner = len(box.size)
    while inner and (inner == len(box.size) or box.size[inner] == source.size[inner] == destination.size[inner]):
        inner -= 1
    # Dimensions after `inner` are whole in both, so that a run is all of them and the box's extent along `inner`.
    length = math.prod(box.size[inner:])
    strides = list(zip(_strides(source.size), _strides(destination.size), strict=True))
    for (from_stride, to_stride), start, a, b in zip(strides, box.start, source.start, destination.start, strict=True):
        source_offset += (start - a) * from_stride
        destination_offset += (start - b) * to_stride
    for index in itertools.product(*map(range, box.size[:inner])):
        from_step = sum(i * stride for i, (stride, _) in zip(index, strides, strict=False))
        to_step = sum(i * stride for i, (_, stride) in zip(index, strides, strict=False))
        yield source_offset + from_step, destination_offset + to_step, length


def layout_from_json(value: Any) -> Layout:
    """The layout that `Layout.to_json` wrote. The value is not trusted: UsageError says what is wrong with it."""
    known = isinstance(value, Mapping) and set(value) == {"shape", "dtype", "axes", "regions"}
    _require(known, f"A layout is an object with shape, dtype, axes and regions, not {str(value)[:80]!r}.")
    shape = _integers(value["shape"], "shape")
    _require(isinstance(value["dtype"], str), f"A layout's dtype is a string, not {value['dtype']!r}.")
    regions = tuple(_region_from_json(entry) for entry in _list(value["regions"], "regions"))
    layout = Layout(shape, value["dtype"], (), (), regions)
    for entry in _list(value["axes"], "axes"):
        fields: list[Any] = entry if isinstance(entry, list) and len(entry) == 3 else [None] * 3
        name, size, kind = fields
        good = isinstance(name, str) and type(size) is int and kind in ("cut", "replicate", "sum", "max")
        _require(good, f"An axis of a layout is [name, size, cut|replicate|sum|max], not {str(entry)[:80]!r}.")
        layout = layout.with_axis(name, size, kind, regions)
    pieces = math.prod(size for (_, size), kind in zip(layout.axes, layout.kinds, strict=True) if kind == "cut")
    problem = f"{len(regions)} regions for {pieces} pieces" if len(regions) != pieces else check_cover(shape, regions)
    _require(not problem, f"The layout of shape {shape} is not valid: {problem}.")
    return layout


def _require(kept: bool, sentence: str) -> None:
    if not kept:
        raise UsageError(sentence)


def _list(value: Any, what: str) -> list[Any]:
    _require(isinstance(value, list), f"A layout's {what} must be a list, not {str(value)[:80]!r}.")
    return value


def _integers(value: Any, what: str) -> tuple[int, ...]:
    good = all(type(item) is int and item >= 0 for item in _list(value, what))
    _require(good, f"A layout's {what} must be a list of integers that are not negative, not {str(value)[:80]!r}.")
    return tuple(value)


def _region_from_json(value: Any) -> Region:
    boxes = []
    for entry in _list(value, "region"):
        _require(len(_list(entry, "box")) == 2, f"A layout's box must be [start, size], not {str(entry)[:80]!r}.")
        start, size = _integers(entry[0], "box start"), _integers(entry[1], "box size")
        _require(len(start) == len(size), f"A layout's box has a start of {len(start)} dimensions and a size of {len(size)}.")
        boxes.append(Box(start, size))
    return tuple(boxes)
