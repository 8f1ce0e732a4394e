"""Launching Triton kernels in little host time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

log = logging.getLogger("intarsia.kernels")

ALIGNED = 16
"""Bytes: Triton compiles another variant for pointers that are not multiples of it."""

LARGEST = 2**31
"""From here on a number is passed in 64 bits, which is another variant too."""


class Launcher:
    """Launches one Triton kernel; from the second time on for equal types without its argument binder, which takes longer than a small kernel runs.

    The kernel's parameters are tensors, then numbers and scalar tensors, then constants. Numbers must not be specialised on (`do_not_specialize`), nor scalar tensors on their alignment.
    Where a compiled kernel of the installed Triton cannot be called with plain addresses, the binder stays.
    """

    def __init__(self, kernel: Any, warps: int) -> None:
        self._kernel, self._warps = kernel, warps
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, blocks: int, tensors: Sequence[Tensor], scalars: Sequence[Any], constants: Sequence[Any], size: int) -> None:
        """Run `blocks` programs on the current stream of the tensors' device. `size`: the largest number among the scalars."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        if together % ALIGNED or size >= LARGEST:
            self._kernel[(blocks,)](*tensors, *scalars, *constants, num_warps=self._warps)
            return
        types = [scalar.dtype if isinstance(scalar, Tensor) else None for scalar in scalars]
        key = (tensors[0].get_device(), *[tensor.dtype for tensor in tensors], *types, *constants)
        compiled = self._compiled.get(key)
        if compiled is not None:
            try:
                compiled[(blocks, 1, 1)](*addresses, *scalars, *constants)
                return
            except TypeError as error:
                log.info("the installed Triton's compiled kernels cannot be called with addresses (%s): its argument binder is used", error)
                self._compiled[key] = None
        found = self._kernel[(blocks,)](*tensors, *scalars, *constants, num_warps=self._warps)
        # The interpreter gives back nothing, and what was refused once is not tried again.
        self._compiled.setdefault(key, found if hasattr(found, "__getitem__") else None)
