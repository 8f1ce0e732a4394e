"""row: Y = X W^T with the columns of W (its inputs) shared out.

Each rank has the inputs that a column projection before it made, of all tokens; the products are partial and are summed where the region ends: each rank gets
its own part of the sequence. The bias is added after that, once. Gradients: the own columns' are whole in what this rank's tokens say: no sum along tp; the
bias's is a partial sum along tp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from intarsia.comm import Communicator
from intarsia.errors import UsageError
from torch import Tensor, nn

from intarsia_parallel.collectives import even_counts, scatter_sum
from intarsia_parallel.config import RowConfig
from intarsia_parallel.cuts import EvenCut
from intarsia_parallel.roles.common import (
    OVERLAP,
    TENSOR,
    Groups,
    ParameterCuts,
    expect_linear,
    expect_shares,
    has_payload,
    is_plain,
    product_without_bias,
    wrap,
)


class Row:
    """See the module. `ends_region`: its output is this rank's part of the sequence."""

    ends_region = True

    def __init__(self, config: RowConfig) -> None:
        self.unit = config.unit

    def check(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> None:
        """It is a projection whose bias can be added apart, and every rank gets inputs."""
        expect_linear(name, module, "row")
        expect_shares(name, "inputs", int(module.in_features), self.unit, sizes[TENSOR])  # type: ignore[arg-type]
        if module.bias is not None and not is_plain(module):
            raise UsageError(
                f"{name} has the role row and a bias, and {type(module).__name__} has a forward of its own: its bias would be added once by every rank. Build it "
                "without a bias, or derive it from intarsia_models_common's Linear without another forward."
            )

    def cut(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> ParameterCuts:
        """The weight along its second dimension; the bias stays whole."""
        return {"weight": (TENSOR, EvenCut(1, self.unit))}

    def apply(self, name: str, module: nn.Module, groups: Groups) -> None:
        """Sum and cut the product, then add the bias."""
        comm = groups(TENSOR)
        if comm.size > 1:
            wrap(module, _summed, comm, name, module)


def _summed(comm: Communicator, name: str, module: Any, forward: Callable[[Tensor], Tensor], x_BSI: Tensor) -> Tensor:
    overlapped = getattr(module, OVERLAP, None)
    if overlapped is not None and x_BSI.ndim == 3 and not has_payload(module):
        y_BSO = overlapped.product_summed(comm, x_BSI, module.weight)
    else:
        partial_BSO = product_without_bias(module, forward, x_BSI)
        y_BSO = scatter_sum(partial_BSO, -2, even_counts(partial_BSO.shape[-2], comm.size), comm, name)
    return y_BSO if module.bias is None else y_BSO + module.bias


def build(config: RowConfig) -> Row:
    """The entry's target."""
    return Row(config)
