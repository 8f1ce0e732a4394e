"""What is known of the whole rows of a batch of which a rank holds a part. Shape suffixes: B rows, T tokens of the whole row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from intarsia import ops
from intarsia.errors import PluginError
from torch import Tensor

from intarsia_parallel.context.cut import Ranges, SequenceCut, slices
from intarsia_parallel.context.plan import Documents
from intarsia_parallel.context.transfer import on_device


class Rows:
    """What is known of the whole rows: from the lengths of their documents, on the host, and on the device where it is asked for."""

    def __init__(self, cut: SequenceCut, lengths: tuple[tuple[int, ...], ...], windows: Sequence[int | None], device: torch.device) -> None:
        for row in lengths:
            if sum(row) != cut.tokens:
                raise PluginError(f"A batch's row has documents of {sum(row)} tokens, its cut is of {cut.tokens}.")
        self.cut, self.lengths, self.windows, self.device = cut, lengths, tuple(windows), device
        self.documents = Documents.of(lengths)

    @functools.cached_property
    def packing(self) -> ops.Packing:
        """For kernels that see whole rows."""
        packing = ops.Packing(self.lengths)
        if self.documents_BT is not None:
            ops.attention.prepare(packing, windows=self.windows, documents_BS=self.documents_BT)
        return packing

    @functools.cached_property
    def documents_BT(self) -> Tensor | None:
        """int32 numbers along the row; None where no row has more than one."""
        return None if self.documents.single else self._repeated(range(len(row)) for row in self.lengths).to(torch.int32)

    @functools.cached_property
    def positions_BT(self) -> Tensor:
        """int64, counted from each document's beginning."""
        starts_BT = self._repeated([sum(row[:i]) for i in range(len(row))] for row in self.lengths)
        return torch.arange(self.cut.tokens, device=self.device) - starts_BT

    def positions_of(self, ranges: Ranges) -> Tensor:
        """Those of some tokens, in the row's order."""
        return slices(self.positions_BT, ranges, 1)

    def documents_of(self, ranges: Ranges) -> Tensor | None:
        """Those of some tokens, in the row's order."""
        return None if self.documents_BT is None else slices(self.documents_BT, ranges, 1)

    def _repeated(self, values: Any) -> Tensor:
        """[B, T]: each document's value for each of its tokens."""
        rows = [
            [value for value, length in zip(each, row, strict=True) for _ in range(length)]
            for each, row in zip(values, self.lengths, strict=True)
        ]
        return on_device(rows, torch.int64, self.device)
