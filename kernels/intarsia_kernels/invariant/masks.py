"""What is made of a call's mask tensors, kept from layer to layer. Shape suffixes as in `intarsia.ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

Made = TypeVar("Made")


class LastMasks(Generic[Made]):
    """Of the last call: its mask tensors, how they were, and what was made of them. All layers of a model ask for the same."""

    def __init__(self) -> None:
        self._last: tuple[Any, Any, Made] | None = None

    def get(self, sizes: tuple[Any, ...], masks: tuple[Tensor | None, ...], make: Callable[[], Made]) -> Made:
        """What `make` gives, or gave for these very `sizes` and `masks`."""
        given = [mask for mask in masks if mask is not None]
        if any(mask.is_inference() for mask in given):  # they do not say whether they were written since
            return make()
        # Tensors that are kept alive and were not written since hold what they held.
        state = (
            *sizes,
            *(None if mask is None else (mask.data_ptr(), mask._version, mask.shape, mask.stride(), mask.dtype) for mask in masks),
        )
        last = self._last
        if last is None or last[0] != state:
            last = self._last = state, masks, make()
        return last[2]
