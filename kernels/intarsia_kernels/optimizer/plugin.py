"""Kernels for the update rules of `intarsia_optimizers.updates`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl(optionalhook=True)
def offer_optimizer_kernels() -> Sequence[KernelEntry]:
    """AdamW of a flat run in one launch, Newton-Schulz by symmetric products, and what Muon does before and after it."""
    return [
        KernelEntry(
            name="fused_adamw",
            op="adamw_update",
            target="intarsia_kernels.optimizer.adamw:fused_adamw",
            doc="AdamW in one pass over a flat run, split masters and bfloat16 state included.",
            needs=("cuda", "triton"),
            dtypes=("float32", "bfloat16"),
            bounds={"*@float32": 2e-6, "*@bfloat16": 8e-3},
            numerics="tolerance",
            invariant=True,
            priority=10,
        ),
        KernelEntry(
            name="quantised_adamw",
            op="adamw_quantised",
            target="intarsia_kernels.optimizer.quantised_adamw:adamw_quantised",
            doc="AdamW in one pass that also writes the new values as float8 for the next gather.",
            needs=("cuda", "fp8", "triton"),
            dtypes=("float32", "bfloat16"),
            bounds={"*@float32": 2e-6, "*@bfloat16": 8e-3},
            numerics="tolerance",
            invariant=True,
            priority=10,
        ),
        KernelEntry(
            name="symmetric_newton_schulz",
            op="newton_schulz",
            target="intarsia_kernels.optimizer.newton_schulz:newton_schulz",
            doc="Newton-Schulz in float16 by symmetric products, half of whose tiles are computed; each product by the strategy that is fastest for its shape.",
            needs=("cuda", "triton"),
            dtypes=("bfloat16", "float16"),
            bounds={"*": 5e-2},
            numerics="tolerance",
            priority=10,
        ),
        *(
            KernelEntry(
                name=f"fused_{op}",
                op=op,
                target=f"intarsia_kernels.optimizer.muon:{op.removeprefix('muon_')}",
                doc=doc,
                needs=("cuda", "triton"),
                dtypes=("float32", "bfloat16"),
                bounds={"*@float32": 2e-6, "*@bfloat16": 8e-3},
                numerics="tolerance",
                invariant=True,
                priority=10,
            )
            for op, doc in (
                ("muon_directions", "Muon's momentum and direction in one pass over eight matrices at a time."),
                ("muon_apply", "Muon's decay and update in one pass over eight matrices at a time, split masters included."),
            )
        ),
    ]
