"""Quantising a rank's shard and what comes back, on flat buffers: the references, and the kernels that stand in for them on a device.

The format and its arithmetic are `intarsia_float8.format`'s.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from intarsia.device import capabilities
from intarsia_float8.format import FORMAT, dequantise, quantise
from torch import Tensor

from intarsia_flexshard.wire import QuantisedBox


def quantise_tiles(
    values: Tensor, wire: Tensor, boxes: Sequence[QuantisedBox], tile: tuple[int, int], power_of_two: bool, dtype: torch.dtype
) -> None:
    """Quantise boxes of `values` (1-D, a rank's shard) into `wire` (1-D uint8, in which scales begin at multiples of 4), from the values as they are in `dtype`."""
    scales_at = wire[: wire.numel() // 4 * 4].view(torch.float32)
    for value, payload, scale, rows, columns in boxes:
        found, scales = quantise(values[value : value + rows * columns].view(rows, columns).to(dtype), tile, power_of_two)
        wire[payload : payload + rows * columns].copy_(found.view(torch.uint8).flatten())
        scales_at[scale : scale + scales.numel()].copy_(scales.flatten())


def dequantise_tiles(payload: Tensor, scales: Tensor, tile: tuple[int, int], out: Tensor) -> None:
    """out = payload * scale in `out`'s dtype. `payload` [R, C] or [E, R, C] float8 and `out` may be parts of larger tensors; `scales` has a value for each tile."""
    out.copy_(dequantise(payload, scales, tile, out.dtype))


class Tiles(NamedTuple):
    """What carries the two out."""

    quantise: Callable[..., None]
    dequantise: Callable[..., None]


@functools.cache
def best_tiles(device_type: str) -> Tiles:
    """Kernels where they are installed and can run, each with its reference for what it cannot take."""
    installed = importlib.util.find_spec("intarsia_kernels") and importlib.util.find_spec("triton")
    if device_type == "cuda" and installed and "fp8" in capabilities():
        from intarsia_kernels.fp8 import tiles

        return Tiles(_guarded(tiles.quantise_tiles, quantise_tiles), _guarded(tiles.dequantise_tiles, dequantise_tiles))
    return Tiles(quantise_tiles, dequantise_tiles)


def _guarded(kernel: Any, reference: Callable[..., None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        (kernel if kernel.supports(*arguments) is None else reference)(*arguments)

    return run


__all__ = ["FORMAT", "Tiles", "best_tiles", "dequantise_tiles", "quantise_tiles"]
