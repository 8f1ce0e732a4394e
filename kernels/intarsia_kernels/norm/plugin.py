"""Kernels for the operator `rms_norm`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_kernels() -> Sequence[KernelEntry]:
    """One program for each row, forward and backward."""
    return [
        KernelEntry(
            name="triton",
            op="rms_norm",
            target="intarsia_kernels.norm.triton_rms_norm:rms_norm",
            doc="RMSNorm in Triton, forward and backward; one program for a row.",
            needs=("cuda", "triton"),
            dtypes=("float32", "bfloat16", "float16"),
            bounds={"*@float32": 2e-5, "*@bfloat16": 2e-2, "*@float16": 4e-3},
            numerics="tolerance",
            invariant=True,
            in_compile=True,
            priority=10,
        )
    ]
