"""Products whose rows do not depend on how many rows there are. N rows, I input and O output features.

Libraries of matrix products choose their inner loops by the number of rows, and with the loops the order of sums: a float32 row of a batch of one differs from the same row of a batch of
sixteen. Here a row's bits are defined by the product of a tile of 16 rows. One product over many tiles gives the same bits wherever the library's loops are the same,
which is looked at for each new shape (the first, the middle and the last tile); where it does not, tiles are multiplied one at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from intarsia.errors import UsageError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

TILE = 16
"""Rows of a tile, and the fewest columns: products of fewer go through loops of their own."""
ALIGNED = 64
"""Bytes. Some loops depend on where a matrix begins."""

_whole: dict[tuple[object, ...], bool] = {}
"""Whether one product over all tiles gives each tile's bits, by shape, strides, dtype and threads."""


def product(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """`x @ weight^T`, [N, O], of two matrices of one dtype on the CPU; the weight's strides are free.

    Raises UsageError where this machine's library makes a row's bits depend on the row's place in a tile.
    """
    rows, outputs = x_NI.shape[0], weight_OI.shape[0]
    if isinstance(x_NI, FakeTensor) or isinstance(weight_OI, FakeTensor) or x_NI.is_meta or not rows or not outputs:
        return torch.mm(x_NI, weight_OI.t())  # shapes alone
    if rows % TILE:
        x_NI = F.pad(x_NI, (0, 0, 0, -rows % TILE))
    elif not x_NI.is_contiguous() or x_NI.data_ptr() % ALIGNED:
        x_NI = x_NI.clone(memory_format=torch.contiguous_format)
    if outputs < TILE:
        weight_OI = F.pad(weight_OI, (0, 0, 0, TILE - outputs))
    weight_IO = weight_OI.t()
    key = (x_NI.shape, weight_OI.shape, weight_OI.stride(), weight_OI.data_ptr() % ALIGNED, x_NI.dtype, torch.get_num_threads())
    if _whole.get(key, True):
        y_NO = torch.mm(x_NI, weight_IO)
        if key not in _whole and (seen := _is_by_tiles(y_NO, x_NI, weight_OI)) is not None:
            _whole[key] = seen
        if _whole.get(key, True):
            return y_NO[:rows, :outputs]
    weight_IO = weight_OI.contiguous().clone().t()
    return torch.cat([torch.mm(tile.clone(), weight_IO) for tile in x_NI.split(TILE)])[:rows, :outputs]


def _is_by_tiles(y_NO: Tensor, x_NI: Tensor, weight_OI: Tensor) -> bool | None:
    """Whether y's first, middle and last tiles have the bits of tiles multiplied alone; None where numbers that are none leave it open."""
    weight_IO, tiles = weight_OI.contiguous().clone().t(), x_NI.shape[0] // TILE
    for number in sorted({0, tiles // 2, tiles - 1}):
        chosen = slice(number * TILE, (number + 1) * TILE)
        tile = x_NI[chosen].clone()
        alone = torch.mm(tile, weight_IO)
        if alone.isnan().any():
            return None
        if not torch.equal(torch.mm(tile.flip(0), weight_IO).flip(0), alone):
            raise UsageError(
                f"The product of {x_NI.dtype} rows by a matrix of {tuple(weight_OI.shape)} depends on a row's place in a tile of {TILE} on this machine "
                f"({torch.get_num_threads()} threads): no kernel here can make it independent of the batch. Choose another dtype, or turn the batch-invariant mode off."
            )
        if not torch.equal(y_NO[chosen], alone):
            return False
    return True
