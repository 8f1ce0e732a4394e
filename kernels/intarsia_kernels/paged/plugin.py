"""Kernels of the operator `paged_attention`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1

_HERE = "intarsia_kernels.paged"
_BOUNDS = {"*@float32": 2e-5, "*@bfloat16": 2e-2, "*@float16": 4e-3}


@hookimpl
def offer_kernels() -> Sequence[KernelEntry]:
    """One that fills a GPU, and one whose bits do not depend on the batch."""
    return [
        KernelEntry(
            name="paged_attention/split",
            op="paged_attention",
            target=f"{_HERE}.split:paged_attention",
            doc="Triton: a GPU's programs share all blocks that are seen, and a second launch sums what of a request several of them have read.",
            needs=("cuda", "triton"),
            dtypes=("bfloat16", "float16", "float32"),
            bounds=_BOUNDS,
            in_compile=True,
            priority=10,
        ),
        KernelEntry(
            name="paged_attention/blocks",
            op="paged_attention",
            target=f"{_HERE}.blocks:paged_attention",
            doc="Triton: attention/blocks bit for bit, through tables. It runs when it is named.",
            needs=("cuda", "triton"),
            dtypes=("bfloat16",),
            bounds=_BOUNDS,
            invariant=True,
            in_compile=True,
        ),
    ]
