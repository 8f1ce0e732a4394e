"""Launching Triton kernels in little host time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("intarsia.kernels")

ALIGNED = 16
"""Bytes: Triton compiles another variant for pointers that are not multiples of it."""

LARGEST = 2**31
"""From here on a number is passed in 64 bits, which is another variant too."""


# Of a device by number; a build of torch without CUDA has it not.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Launch:
    """A compiled kernel on one device, called with plain addresses and numbers: nothing is looked up but the current stream."""

    def __init__(self, compiled: Any, device: int) -> None:
        self._run, self._function, self._metadata, self._device = compiled.run, compiled.function, compiled.packed_metadata, device

    def __call__(self, blocks: int, *arguments: Any) -> None:
        """Run `blocks` programs on the current stream. `arguments` are all of the kernel's, constants too."""
        self._run(blocks, 1, 1, current_stream(self._device), self._function, self._metadata, None, None, None, *arguments)


class Launcher:
    """Launches one Triton kernel; from the second time on for equal types without its argument binder, which takes longer than a small kernel runs.

    The kernel's parameters are tensors, then numbers and scalar tensors, then constants. Numbers must not be specialised on (`do_not_specialize`), nor scalar tensors on their alignment.
    Where a compiled kernel of the installed Triton cannot be called with plain addresses, the binder stays. Without `contracts` the compiler makes no product and sum one operation (which rounds
    once, and which the compiler may choose otherwise in another kernel, or for another dtype of the same): `tl.fma` is there for those that are to be one.
    """

    def __init__(self, kernel: Any, warps: int, contracts: bool = True) -> None:
        self._kernel, self._options = kernel, {"num_warps": warps, "enable_fp_fusion": contracts}
        self._launches: dict[tuple[Any, ...], Launch | None] = {}

    def __call__(
        self, blocks: int, tensors: Sequence[Tensor], scalars: Sequence[Any], constants: Sequence[Any], size: int
    ) -> Launch | None:
        """Run `blocks` programs on the current stream of the tensors' device. `size`: the largest number among the scalars. Gives back what launches the same for other addresses that are
        multiples of `ALIGNED`, of tensors of the same dtypes; None where only a call of this does, or the first time."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in addresses:
            together |= address
        if together % ALIGNED or size >= LARGEST:
            self._kernel[(blocks,)](*tensors, *scalars, *constants, **self._options)
            return None
        types = [scalar.dtype if isinstance(scalar, Tensor) else None for scalar in scalars]
        device = tensors[0].get_device()
        key = (device, *[tensor.dtype for tensor in tensors], *types, *constants)
        launch = self._launches.get(key)
        if launch is not None:
            plain = [scalar.data_ptr() if isinstance(scalar, Tensor) else scalar for scalar in scalars]
            try:
                launch(blocks, *addresses, *plain, *constants)
                return launch
            except TypeError as error:
                log.info("the installed Triton's compiled kernels cannot be called with addresses (%s): its argument binder is used", error)
                self._launches[key] = None
        found = self._kernel[(blocks,)](*tensors, *scalars, *constants, **self._options)
        # The interpreter gives back nothing, and what was refused once is not tried again.
        if key not in self._launches:
            can = current_stream is not None and all(hasattr(found, name) for name in ("run", "function", "packed_metadata"))
            self._launches[key] = Launch(found, device) if can else None
        return None
