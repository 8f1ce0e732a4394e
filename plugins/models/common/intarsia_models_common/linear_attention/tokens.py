"""Which tokens of a row belong together, and which are real. Shape suffixes: B rows, S tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def segments(documents_BS: Tensor | None, counts_B: Tensor | None) -> Tensor | None:
    """int64 numbers, from 0, that go up by 1 wherever the document changes; None where no documents are known. Tokens behind a row's count belong to its last document, so that
    nothing begins there."""
    if documents_BS is None or documents_BS.shape[1] == 0:
        return None
    begins_BS = documents_BS[:, 1:] != documents_BS[:, :-1]
    if counts_B is not None:
        begins_BS = begins_BS & (torch.arange(1, documents_BS.shape[1], device=documents_BS.device) < counts_B[:, None])
    return F.pad(begins_BS.long().cumsum(1), (1, 0))


def real(tokens: int, counts_B: Tensor | None) -> Tensor | None:
    """Whether each token is real, [B, S]; None: all are."""
    return None if counts_B is None else torch.arange(tokens, device=counts_B.device) < counts_B[:, None]


def silenced(inputs: tuple[Tensor, ...], real_BS: Tensor | None) -> tuple[Tensor, ...]:
    """Tensors [B, S, ...] with zeros at tokens that are not real, be it NaN that stands there: without decay, share and key such a token forgets nothing and writes nothing."""
    if real_BS is None:
        return inputs
    return tuple(x.masked_fill(~real_BS.view(*real_BS.shape, *(1,) * (x.ndim - 2)), 0.0) for x in inputs)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which states and inner products are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32
