"""What the distribution offers. Torch-free."""

from __future__ import annotations

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_kernels() -> list[KernelEntry]:
    """The kernel, with what it promises."""
    return [
        KernelEntry(
            name="lean",
            op="swiglu",
            target="acme_swiglu.kernel:swiglu",
            doc="SwiGLU that keeps only its inputs for backward.",
            dtypes=("float32", "bfloat16", "float16", "float64"),
            numerics="tolerance",
            bounds={"*@float64": 1e-12, "*@float32": 1e-6, "*@float16": 1e-3, "*@bfloat16": 8e-3},
            in_compile=True,
            priority=0,
        )
    ]
