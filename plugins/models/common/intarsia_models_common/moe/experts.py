"""Routed experts over grouped products. M rows in the order of experts, e experts of this rank, D model width, F hidden width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from intarsia import ops
from intarsia.contracts import Init
from torch import Tensor, nn

from intarsia_models_common.build import Scope, parameter
from intarsia_models_common.moe.operators import GROUPED_LINEAR, GROUPED_SWIGLU, SCALED_GROUPED_LINEAR


class Experts(nn.Module):
    """y = W2 (silu(W1 x) * W3 x), row by row, by the matrices of the row's expert.

    Parameters are stacks of `experts` matrices, `w1` and `w3` [E, F, D] and `w2` [E, D, F]; expert parallelism cuts them on dim 0. A sharder that gathers a stack as float8 puts it
    beside the parameter, which then has only its shape and takes its gradient (`NAME_payload`, `NAME_scales` and `NAME_tile` as in `scaled_grouped_linear`).
    `dispatcher` brings rows here; `local_sequence` is this rank's part of a [B, S] tensor where the model's tokens are cut further than the context's (None: they are not).
    """

    reads_payload: ClassVar[tuple[str, ...]] = ("w1", "w3", "w2")

    def __init__(self, experts: int, hidden: int, scope: Scope) -> None:
        super().__init__()
        self.experts, self.std, self.output_std = experts, scope.std, scope.output_std
        self.w1 = parameter(experts, hidden, scope.dim)
        self.w3 = parameter(experts, hidden, scope.dim)
        self.w2 = parameter(experts, scope.dim, hidden)
        self.dispatcher: Any = None
        self.local_sequence: Callable[[Tensor], Tensor] | None = None

    def forward(self, x_MD: Tensor, counts_e: Tensor) -> Tensor:
        """[M, D]; rows after the last expert's are 0."""
        if _is_gated_at_once() and getattr(self, "w1_payload", None) is None and getattr(self, "w3_payload", None) is None:
            return self._product(GROUPED_SWIGLU(x_MD, self.w1, self.w3, counts_e), "w2", counts_e)
        gate_MF, up_MF = self._product(x_MD, "w1", counts_e), self._product(x_MD, "w3", counts_e)
        return self._product(ops.swiglu(gate_MF, up_MF), "w2", counts_e)

    def _product(self, x_MI: Tensor, name: str, counts_e: Tensor) -> Tensor:
        weight_EOI = getattr(self, name)
        payload_EOI = getattr(self, f"{name}_payload", None)
        if payload_EOI is None:
            return GROUPED_LINEAR(x_MI, weight_EOI, counts_e)
        tile = getattr(self, f"{name}_tile", (128, 128))
        return SCALED_GROUPED_LINEAR(x_MI, weight_EOI, payload_EOI, getattr(self, f"{name}_scales"), counts_e, tile)

    def inits(self) -> dict[str, Init]:
        """Normal, each into its own direction."""
        return {"w1": Init("normal", std=self.std), "w3": Init("normal", std=self.std), "w2": Init("normal", std=self.output_std)}

    @property
    def flops_per_row(self) -> float:
        """Forward FLOPs of one row."""
        return 2.0 * sum(float(torch.Size(weight.shape[1:]).numel()) for weight in (self.w1, self.w3, self.w2))


def _is_gated_at_once() -> bool:
    """Whether the kernel in force for `grouped_swiglu` may run: one that has `stands_for`, pairs of an operator and a function, is left out unless those are in force, so that whoever names
    another kernel for one of them, or puts off its weights' gradients, is heard."""
    kernel = GROUPED_SWIGLU.choice.function
    return kernel is not None and all(operator.choice.function is function for operator, function in getattr(kernel, "stands_for", ()))
