"""A format of matrices: float8 with one scale for each tile.

A value is `payload * scale`; tiles are anchored at the origin, those at the edges may be short. Shape suffixes: I input and O output features, i and o
their tiles, E matrices of a stack.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
# A tile of zeros has a scale as well, and no scale is subnormal.
SMALLEST = 1e-12


def quantise(values_EOI: Tensor, tile: tuple[int, int], power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Payload (float8_e4m3fn, the values' shape [..., O, I]) and scales (float32, [..., o, i]) of a matrix or a stack of matrices.

    scale = max(largest |value| of the tile, 1e-12) / 448, rounded to float32, and up to a power of two where asked; payload = clamp(value * (1 / scale), -448, 448),
    rounded to nearest even. All in float32. A value that is not finite makes its whole tile NaN or infinite: it is not hidden.
    """
    *_, rows, columns = values_EOI.shape
    padded = F.pad(values_EOI.float(), (0, -columns % tile[1], 0, -rows % tile[0]))
    tiles = padded.unflatten(-1, (-1, tile[1])).unflatten(-3, (-1, tile[0]))  # [..., o, rows, i, columns]
    # By a tensor: CUDA multiplies by the reciprocal of a number, which is another rounding.
    scales = tiles.abs().amax((-3, -1), keepdim=True).clamp_min(SMALLEST) / tiles.new_full((), LARGEST)
    if power_of_two:
        up = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scales = torch.where(scales.isfinite(), up, scales)
    payload = (tiles * scales.reciprocal()).clamp(-LARGEST, LARGEST).flatten(-2).flatten(-3, -2)
    return payload[..., :rows, :columns].contiguous().to(FORMAT), scales.squeeze(-1).squeeze(-2)


def dequantise(payload_EOI: Tensor, scales_Eoi: Tensor, tile: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """payload * scale, multiplied in float32 (float64 for that dtype) and rounded to `dtype`."""
    *_, rows, columns = payload_EOI.shape
    wide = torch.promote_types(dtype, torch.float32)
    scales = scales_Eoi.to(wide).repeat_interleave(tile[0], -2)[..., :rows, :].repeat_interleave(tile[1], -1)[..., :columns]
    return (payload_EOI.to(wide) * scales).to(dtype)
