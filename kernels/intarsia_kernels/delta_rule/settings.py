"""How the kernels of the gated delta rule are cut, by dtype and width. `benchmarks/delta_rule.py --tune` measures others on the GPU at hand."""

from __future__ import annotations

import dataclasses
import functools
import os

import torch

WIDTHS = (64, 128, 256)
"""Widths of keys and of values that the kernels take."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """Columns of values (or keys, in `prepare`) that a program takes at a time, its warps, and how many loads of a loop are under way at once. `resident`: programs of a multiprocessor, where
    their number is free. `registers`: at most so many of a thread, that more programs share a multiprocessor
    (0: what the compiler takes; in a compiled region it is that always, since Inductor passes no such limit on)."""

    block: int
    warps: int
    stages: int
    resident: int = 1
    registers: int = 0

    def launch(self) -> dict[str, int]:
        """What is said where a kernel is launched."""
        return {"num_warps": self.warps, **({"maxnreg": self.registers} if self.registers else {})}


@dataclasses.dataclass(frozen=True)
class Settings:
    """One cut for each kernel, tokens of a chunk, and how `prepare` multiplies where it inverts ("tf32", or "tf32x3" for all of float32)."""

    chunk: int
    prepare: Cut
    forward: Cut
    backward: Cut
    gradients: Cut
    inverse: str = "tf32x3"


NARROW = {
    64: Settings(64, Cut(64, 4, 1), Cut(64, 4, 2, 2), Cut(64, 4, 2, 2), Cut(32, 8, 2), "tf32"),
    128: Settings(64, Cut(128, 4, 1, 1, 128), Cut(64, 4, 2, 2), Cut(64, 4, 3), Cut(64, 8, 3), "tf32"),
    256: Settings(64, Cut(128, 4, 1), Cut(64, 8, 1), Cut(64, 8, 1), Cut(32, 8, 1), "tf32"),
}
"""For 16-bit inputs, by the width of keys. Those of 128 were measured on an H200 (`benchmarks/results/delta-rule-h200.json`): wider blocks of values are up to 4 % faster there with 128 runs of a state, and
have half the programs where there are fewer."""
WIDE = {width: Settings(32, Cut(64, 4, 1), Cut(16, 4, 1, 2), Cut(16, 4, 1, 2), Cut(16, 8, 1)) for width in WIDTHS}
"""For float32."""
_measured: dict[int, Settings] = {}
"""What a benchmark puts in the place of the above, by width."""


def settings(dtype: torch.dtype, width: int) -> Settings:
    """How to cut, for inputs of a dtype and keys of a width."""
    return _measured.get(width) or (WIDE if dtype == torch.float32 else NARROW)[width]


@functools.cache
def multiprocessors(device: int) -> int:
    """Of a GPU; under Triton's interpreter a few."""
    if "TRITON_INTERPRET" in os.environ or not torch.cuda.is_available():
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count
