"""Kernels for the operator `cross_entropy`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_kernels() -> Sequence[KernelEntry]:
    """Softmax, loss and gradient of a chunk's logits in one kernel, in place."""
    return [
        KernelEntry(
            name="cross_entropy/triton",
            op="cross_entropy",
            target="intarsia_kernels.loss.triton_cross_entropy:cross_entropy",
            doc="Cross-entropy whose softmax and gradient overwrite a chunk's logits in one Triton kernel; the products are cuBLAS's.",
            needs=("cuda", "triton"),
            dtypes=("float32", "bfloat16", "float16"),
            bounds={"*@float32": 2e-5, "*@bfloat16": 2e-2, "*@float16": 4e-3},
            numerics="tolerance",
            in_compile=True,
            priority=10,
        )
    ]
