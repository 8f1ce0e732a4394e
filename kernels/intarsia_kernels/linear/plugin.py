"""Kernels for the operator `linear`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_kernels() -> Sequence[KernelEntry]:
    """oneDNN's float32 product on CPUs with AVX-512, where torch's own goes through a library that may not use those registers; elsewhere torch's, with gradients where sharders want them."""
    return [
        KernelEntry(
            name="onednn",
            op="linear",
            target="intarsia_kernels.linear.onednn:linear",
            doc="oneDNN's inner product for float32 on CPUs with AVX-512, forward and the input's gradient.",
            needs=("cpu", "onednn", "avx512"),
            dtypes=("float32",),
            bounds={"*": 2e-5},
            numerics="tolerance",
            priority=10,
        ),
        KernelEntry(
            name="placed",
            op="linear",
            target="intarsia_kernels.linear.placed:linear",
            doc="torch's own product; the weight's gradient is written straight into what a sharder sends, where it offers a place.",
            bounds={"*@float32": 2e-5, "*@bfloat16": 2e-2, "*@float16": 5e-3},
            numerics="bitwise",
            in_compile=True,
            priority=5,
        ),
    ]
