"""Where gradients of weights are written.

Who sends gradients on packs them into one buffer first. It may say beforehand where in there a weight's gradient is wanted: it marks the weight, and offers the place before backward reaches it. What computes
the gradient takes the place and writes there, so that nothing is copied and no memory is needed beside. Nobody has to take: a gradient that lies elsewhere is packed as ever. A place is taken once: what is
computed for the same weight afterwards is a tensor of its own, which autograd adds.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes. Libraries choose other routines, of other bits, where a result begins elsewhere."""
_MARK = "_intarsia_placed"
_places: dict[int, Tensor] = {}


def mark(weight: Tensor) -> None:
    """Places are going to be offered for this weight. Before anything is compiled that reads it. Stability: provisional."""
    setattr(weight, _MARK, True)


def is_marked(weight: Tensor) -> bool:
    """Whether `mark` was called: kernels that take places do without their costs otherwise. Stability: provisional."""
    return getattr(weight, _MARK, False)


def offer(weight: Tensor, place: Tensor) -> bool:
    """A place of the gradient's shape and dtype, for what is computed next. `weight` is what products read, known by its address: of a float8 layer the payload. False for one that is not aligned, which nobody takes. Stability: provisional."""
    if place.data_ptr() % ALIGNMENT:
        return False
    _places[weight.data_ptr()] = place
    return True


def withdraw(weight: Tensor) -> bool:
    """The place is not to be taken any more. Whether it was still there. Stability: provisional."""
    return _places.pop(weight.data_ptr(), None) is not None


def take(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The place offered for a gradient of `dtype`, or None. Whoever takes it writes all of it, and hands it on as the gradient. Stability: provisional."""
    place = _places.get(weight.data_ptr()) if _places else None
    if place is None or place.dtype != dtype:
        return None
    withdraw(weight)
    # Autograd keeps a gradient as it is where nobody else holds the tensor itself.
    return place.detach()
