"""Weights that are stored in float8 with one scale for each block: W = W8 * scale_inv, dequantised as they are read, a box at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from intarsia.contracts import Box
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_huggingface.safetensors_file import Place

STORED = "float8_e4m3fn"
SUFFIX = "_scale_inv"
SCALES = ("float32", "bfloat16", "float8_e8m0fnu", "uint8")
"""What scales are stored in; the last two are exponents of 2, one byte each."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a folder's weights are quantised: blocks of `rows` x `columns`, those at the ends partial; 0 x 0 where nothing is."""

    rows: int = 0
    columns: int = 0

    def holds(self, place: Place) -> bool:
        """Whether a stored tensor is quantised."""
        return bool(self.rows) and place.dtype == STORED

    def scale_name(self, name: str) -> str:
        """What the tensor with the scales of `name` is called: `experts.3.up_proj.weight_scale_inv` of one expert's `experts.3.up_proj.weight`, and of the stack `experts.gate_up_proj`
        `experts.gate_up_proj_scale_inv`."""
        return name + SUFFIX

    def problems(self, name: str, place: Place, scale: Place) -> list[str]:
        """What is wrong with a quantised tensor and its scales."""
        if len(place.shape) < 2:
            return [
                f"{name} has shape {list(place.shape)} and is stored in {STORED}; only matrices, and stacks of them, can be quantised in blocks"
            ]
        wanted = (*place.shape[:-2], -(-place.shape[-2] // self.rows), -(-place.shape[-1] // self.columns))
        if scale.shape != wanted or scale.dtype not in SCALES:
            return [
                f"{self.scale_name(name)} has shape {list(scale.shape)} in {scale.dtype}; blocks of {self.rows} x {self.columns} of "
                f"{list(place.shape)} need {list(wanted)} in {' or '.join(SCALES)}"
            ]
        return []

    def scale_box(self, box: Box) -> Box:
        """The scales that a box of the weight needs."""
        sizes = (*(1 for _ in box.size[:-2]), self.rows, self.columns)
        start = tuple(first // size for first, size in zip(box.start, sizes, strict=True))
        end = tuple(-(-last // size) for last, size in zip(box.end, sizes, strict=True))
        return Box(start, tuple(max(0, last - first) for first, last in zip(start, end, strict=True)))

    def lacking(self, names: Sequence[str]) -> str:
        """What to say where weights are there and their scales are not."""
        shown = "; ".join(f"{name} is stored in {STORED} and needs {self.scale_name(name)}" for name in names[:3])
        more = f", and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{shown}{more}: of a matrix one number for each block of {self.rows} x {self.columns}, of a stack of matrices a stack of these."

    def dequantised(self, box: Box, stored: Tensor, scales: Tensor) -> Tensor:
        """float32 values of `box`, from its stored ones and the scales of `scale_box(box)` (`numbers_of`). Of a stack of matrices each has its own blocks."""
        if stored.dim() > 2 and stored.shape[0]:
            inner = Box(box.start[1:], box.size[1:])
            return torch.stack([self.dequantised(inner, *pair) for pair in zip(stored, scales, strict=True)])
        out = stored.float()
        if not out.numel():
            return out
        columns = torch.arange(box.start[1], box.end[1]) // self.columns - box.start[1] // self.columns
        spread = scales.index_select(1, columns)
        first = 0
        for row in spread:
            last = min(box.size[0], (box.start[0] + first) // self.rows * self.rows + self.rows - box.start[0])
            out[first:last] *= row
            first = last
        return out


def numbers_of(scales: Tensor) -> Tensor:
    """Scales in float32."""
    return (scales.float() - 127.0).exp2() if scales.dtype == torch.uint8 else scales.float()


def blocks_of(config: Mapping[str, Any], where: str) -> Blocks:
    """From a config.json's `quantization_config`. UsageError, which names what is not supported, for any other kind than float8 in blocks."""
    found = config.get("quantization_config")
    if not found:
        return Blocks()
    size: Any = found.get("weight_block_size") if isinstance(found, Mapping) else None
    kind = {"quant_method": "fp8", "fmt": "e4m3"}
    wrong = [f"{key} = {found.get(key)!r}" for key, value in kind.items() if found.get(key, value) != value] if size else []
    sound = isinstance(size, list | tuple) and len(size) == 2 and all(type(number) is int and number > 0 for number in size)
    if wrong or not sound or found.get("quant_method") != "fp8":
        what = ", ".join(wrong) or f"{dict(found) if isinstance(found, Mapping) else found!r}"
        raise UsageError(
            f"{where} has a quantization_config that cannot be read ({what}): quantised weights must be fp8 (e4m3) with a weight_block_size. Take the "
            "folder of the unquantised model."
        )
    return Blocks(size[0], size[1])
