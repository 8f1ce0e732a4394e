"""Kernels for the operators `attention` and `segment_attention`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_kernels() -> Sequence[KernelEntry]:
    """sdpa everywhere; on a GPU varlen, which reads only what a document holds, comes before flex, and flex before sdpa."""
    return [
        KernelEntry(
            name="sdpa",
            op="attention",
            target="intarsia_kernels.attention.sdpa:attention",
            doc="torch's scaled_dot_product_attention; packed rows document by document, or by mask. No sinks, no softcap.",
            bounds={"*@float32": 2e-5, "*@float64": 1e-12, "*@bfloat16": 2e-2, "*@float16": 4e-3},
            numerics="tolerance",
            in_compile=True,
            priority=10,
        ),
        KernelEntry(
            name="flex",
            op="attention",
            target="intarsia_kernels.attention.flex:attention",
            doc="torch's flex_attention with a block mask for each batch; windows, sinks and softcap included.",
            needs=("cuda", "flex_backward"),
            dtypes=("bfloat16", "float16", "float32"),
            bounds={"*@float32": 5e-3, "*@bfloat16": 2e-2, "*@float16": 4e-3},
            numerics="tolerance",
            in_compile=True,
            priority=20,
        ),
        KernelEntry(
            name="varlen",
            op="attention",
            target="intarsia_kernels.attention.varlen:attention",
            doc="torch's variable-length flash attention over packed rows; scaled_dot_product_attention for rows of one document.",
            needs=("cuda", "varlen"),
            dtypes=("bfloat16", "float16"),
            bounds={"*@bfloat16": 2e-2, "*@float16": 4e-3},
            numerics="tolerance",
            in_compile=True,
            priority=30,
        ),
        KernelEntry(
            name="segment_attention/varlen",
            op="segment_attention",
            target="intarsia_kernels.attention.segments:segment_attention",
            doc="torch's variable-length flash attention: all segments in one launch. It runs when it is named.",
            needs=("cuda", "varlen"),
            dtypes=("bfloat16", "float16"),
            bounds={"*@bfloat16": 2e-2, "*@float16": 4e-3},
            numerics="tolerance",
            in_compile=False,
            priority=0,
        ),
    ]
