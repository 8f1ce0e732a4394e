"""Products of mixtures of experts whose rows do not depend on the batch. N tokens, M rows for experts, E experts, D model width, I input and O output features."""

from __future__ import annotations

from intarsia_models_common.moe.products import grouped, routing, weight_gradient
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from intarsia_kernels.invariant.products import product


def _product(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """[M, O]: each group by itself in tiles, wherever it begins."""
    y_MO = x_MI.new_zeros(x_MI.shape[0], weight_EOI.shape[1])
    if isinstance(counts_E, FakeTensor) or counts_E.is_meta:
        return y_MO  # shapes alone
    start = 0
    for e, count in enumerate(counts_E.tolist()):
        if start + count > x_MI.shape[0]:
            raise ValueError(f"grouped_linear: the groups hold more rows than the {x_MI.shape[0]} that there are")
        if count:
            y_MO[start : start + count] = product(x_MI[start : start + count], weight_EOI[e])
        start += count
    return y_MO


_grouped = grouped(_product, weight_gradient)


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """As the operator `grouped_linear`."""
    return _grouped(x_MI, weight_EOI, counts_E)


grouped_linear.weight_gradient = weight_gradient  # type: ignore[attr-defined]


_routing = routing(product)


def router_linear(x_ND: Tensor, weight_ED: Tensor) -> Tensor:
    """As the operator `router_linear`."""
    return _routing(x_ND, weight_ED)
