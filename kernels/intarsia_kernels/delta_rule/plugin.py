"""Kernels for the operators of linear attention. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1

_PACKAGE = "intarsia_kernels.delta_rule"


@hookimpl
def offer_kernels() -> Sequence[KernelEntry]:
    """For `gated_delta_rule` and `short_conv`."""
    return [
        KernelEntry(
            name="gated_delta_rule/triton",
            op="gated_delta_rule",
            target=f"{_PACKAGE}.rule:gated_delta_rule",
            doc="Chunks by products, states along each document; five launches for outputs and all gradients. Key and value heads 64, 128 or 256 wide.",
            needs=("cuda", "sm80", "triton"),
            dtypes=("bfloat16", "float16", "float32"),
            bounds={"*@float32": 1e-4, "*@bfloat16": 5e-2, "*@float16": 1e-2},
            in_compile=True,
            priority=10,
        ),
        *(
            KernelEntry(
                name=f"gated_delta_rule/{name}",
                op="gated_delta_rule",
                target=f"{_PACKAGE}.peers:{name}",
                doc=doc,
                needs=("cuda", "sm80", "triton", name),
                dtypes=("bfloat16", "float16"),
                bounds={"*@bfloat16": 5e-2, "*@float16": 1e-2},
            )
            for name, doc in (
                (
                    "fla",
                    "flash-linear-attention's kernel, where that is installed (fla-core). Runs when named; waits for the documents' number.",
                ),
                (
                    "attn_gym",
                    "Attention Gym's kernel, where that is installed (attn-gym). Runs when named; waits for the documents' number.",
                ),
            )
        ),
        KernelEntry(
            name="short_conv/triton",
            op="short_conv",
            target=f"{_PACKAGE}.short_conv:short_conv",
            doc="All taps, documents' borders and the activation in one pass; both gradients in another, without atomics.",
            needs=("cuda", "triton"),
            dtypes=("bfloat16", "float16", "float32"),
            bounds={"*@float32": 2e-5, "*@bfloat16": 1e-2, "*@float16": 2e-3},
            in_compile=True,
            priority=10,
        ),
    ]
