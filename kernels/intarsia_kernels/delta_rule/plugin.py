"""Kernels for the operators of linear attention. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1

_PACKAGE = "intarsia_kernels.delta_rule"


@hookimpl
def offer_kernels() -> Sequence[KernelEntry]:
    """For `gated_delta_rule`."""
    return [
        KernelEntry(
            name="gated_delta_rule/triton",
            op="gated_delta_rule",
            target=f"{_PACKAGE}.rule:gated_delta_rule",
            doc="Chunks by products, states along each document; five launches for outputs and all gradients. Key and value heads 64, 128 or 256 wide.",
            needs=("cuda", "sm80", "triton"),
            dtypes=("bfloat16", "float16", "float32"),
            bounds={"*@float32": 1e-4, "*@bfloat16": 3e-2, "*@float16": 4e-3},
            in_compile=True,
            priority=10,
        ),
    ]
