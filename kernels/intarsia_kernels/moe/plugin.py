"""Kernels for mixtures of experts. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1

_MOE = "intarsia_kernels.moe"


def _exact(op: str, module: str, doc: str) -> KernelEntry:
    """One that gives whole numbers: the reference's, but where equal scores leave open which comes first."""
    return KernelEntry(
        name=f"{op}/triton",
        op=op,
        target=f"{_MOE}.{module}:{op}",
        doc=doc,
        needs=("cuda", "triton"),
        dtypes=("float32", "bfloat16", "float16"),
        numerics="bitwise",
        invariant=True,
        in_compile=True,
        priority=10,
    )


def _triton(op: str, module: str, doc: str) -> KernelEntry:
    """One that treats each row by itself and sums in float32: a row's result depends on no other."""
    return KernelEntry(
        name=f"{op}/triton",
        op=op,
        target=f"{_MOE}.{module}:{op}",
        doc=doc,
        needs=("cuda", "triton"),
        dtypes=("float32", "bfloat16", "float16"),
        bounds={"*@float32": 2e-5, "*@bfloat16": 1e-2, "*@float16": 2e-3},
        invariant=True,
        in_compile=True,
        priority=10,
    )


@hookimpl
def offer_kernels() -> Sequence[KernelEntry]:
    """For the operators of `intarsia_models_common.moe`, and `swiglu`."""
    return [
        _triton("permute", "rows", "A program for a token, which is read once; its gradient is summed in float32 by one program."),
        _triton(
            "combine",
            "rows",
            "A token's rows are weighted and summed in float32 by one program; backward gives rows and weights their gradients in one pass.",
        ),
        _triton("swiglu", "swiglu", "silu(gate) * up in one pass, and both gradients in one."),
        _exact(
            "top_experts",
            "choice",
            "The best of a row held in registers, one after the other, of the best groups if asked: one launch and no sort.",
        ),
        _exact("sort_pairs", "sort", "A sort by counting in two launches; nothing waits for the device."),
        _triton("expert_weights", "choice", "A token's weights in one launch, and all its scores' gradients in one."),
        _triton("expert_counts", "choice", "Entropies and counts in two launches, in one order of sums."),
        KernelEntry(
            name="grouped_swiglu/grouped_mm",
            op="grouped_swiglu",
            target=f"{_MOE}.gated:grouped_swiglu",
            doc="Both of torch's grouped products and the gate in one step, where grouped_linear/grouped_mm and swiglu/triton are in force: with their bits, by fewer launches.",
            needs=("cuda", "sm90", "triton"),
            dtypes=("bfloat16",),
            bounds={"*@bfloat16": 2e-2, "*@float32": 2e-5},
            invariant=True,
            in_compile=True,
            priority=10,
        ),
        KernelEntry(
            name="grouped_linear/grouped_mm",
            op="grouped_linear",
            target=f"{_MOE}.products:grouped_linear",
            doc="torch's grouped product for all groups at once, without waiting for their sizes on the host.",
            needs=("cuda", "sm90", "triton"),
            dtypes=("bfloat16",),
            bounds={"*@bfloat16": 2e-2, "*@float32": 2e-5},
            invariant=True,
            in_compile=True,
            priority=10,
        ),
        KernelEntry(
            name="scaled_grouped_linear/grouped_mm",
            op="scaled_grouped_linear",
            target=f"{_MOE}.products:scaled_grouped_linear",
            doc="Float8 weights expanded by a kernel of their own, then the product in force for grouped_linear.",
            needs=("cuda", "triton"),
            dtypes=("float32", "bfloat16", "float16"),
            bounds={"*@float32": 2e-5, "*@bfloat16": 2e-2, "*@float16": 4e-3},
            in_compile=True,
            priority=10,
        ),
        KernelEntry(
            name="router_linear/split",
            op="router_linear",
            target=f"{_MOE}.router:router_linear",
            doc="Float32 logits by bfloat16 tensor cores: the weight is split into three parts that add up to it.",
            needs=("cuda", "sm80", "triton"),
            dtypes=("bfloat16",),
            bounds={"output@bfloat16": 1e-5, "*@bfloat16": 1e-2},
            in_compile=True,
            priority=10,
        ),
    ]
