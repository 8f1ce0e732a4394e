"""Kernels for float8 weights. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_kernels() -> Sequence[KernelEntry]:
    """Linear layers whose weight is float8, multiplied as it is."""
    return [
        KernelEntry(
            name="fp8",
            op="scaled_linear",
            target="intarsia_kernels.fp8.linear:scaled_linear",
            doc="Activations quantised by pieces of 128, block-scaled products in float8 for the output and the input's gradient.",
            needs=("cuda", "sm90", "triton"),
            dtypes=("bfloat16", "float16"),
            bounds={"*@bfloat16": 8e-2, "*@float16": 8e-2},
            numerics="tolerance",
            in_compile=True,
            priority=10,
        )
    ]
