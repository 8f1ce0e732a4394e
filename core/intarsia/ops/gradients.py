"""Where gradients of weights are written.

Who sends gradients on packs them into one buffer first. It may say beforehand where in there a weight's gradient is wanted: it marks the weight, and offers the place before backward reaches it. What computes
the gradient takes the place and writes there, so that nothing is copied and no memory is needed beside. Nobody has to take: a gradient that lies elsewhere is packed as ever. A place is taken once: what is
computed for the same weight afterwards is a tensor of its own, which autograd adds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes of a place's address. Libraries choose other routines, of other bits, where a result begins elsewhere."""
_MARK = "_intarsia_placed"


class Place:
    """A place of a gradient's shape and dtype, or none yet: then it is only counted how often somebody asks. It is offered as long as whoever made it keeps it. Stability: provisional."""

    __slots__ = ("__weakref__", "is_taken", "takes", "tensor")

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.tensor, self.takes, self.is_taken = tensor, 0, False


_places: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()


def mark(weight: Tensor) -> None:
    """Places are going to be offered for this weight. Before anything is compiled that reads it. Stability: provisional."""
    setattr(weight, _MARK, True)


def is_marked(weight: Tensor) -> bool:
    """Whether `mark` was called: kernels that take places do without their costs otherwise. Stability: provisional."""
    return getattr(weight, _MARK, False)


def offer(weight: Tensor, place: Place) -> None:
    """A place for what is computed next. `weight` is what products read, known by its address: of a float8 layer the payload. Stability: provisional."""
    place.takes, place.is_taken = 0, False
    _places[weight.data_ptr()] = place


def withdraw(weight: Tensor) -> None:
    """Nobody takes the place any more. Stability: provisional."""
    _places.pop(weight.data_ptr(), None)


def take(weight: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """The place offered for a gradient, or None. Whoever takes it writes all of it, and hands it on as the gradient. Stability: provisional."""
    place = _places.get(weight.data_ptr()) if _places else None
    if place is None:
        return None
    place.takes += 1
    tensor = place.tensor
    if place.takes > 1 or tensor is None or tensor.dtype != dtype or tensor.shape != shape:
        return None
    place.is_taken = True
    # Autograd keeps a gradient as it is where nobody else holds the tensor itself.
    return tensor.detach()
