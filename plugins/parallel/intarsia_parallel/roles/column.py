"""column: Y = X W^T with the rows of W (its outputs) shared out.

Inside a region every rank has all tokens and makes its own outputs of them; the input's gradient is a partial sum, which the region's gather adds up. Gradients:
the own rows' are whole in what this rank's tokens say: no sum along tp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from intarsia.comm import Communicator
from torch import Tensor, nn

from intarsia_parallel.config import ColumnConfig
from intarsia_parallel.cuts import EvenCut
from intarsia_parallel.roles.common import OVERLAP, TENSOR, Groups, ParameterCuts, expect_linear, expect_shares, gather_tree, wrap


class Column:
    """See the module. `is_column`: an overlapped region may compute it while it gathers."""

    is_column = True

    def __init__(self, config: ColumnConfig) -> None:
        self.gather, self.unit = config.gather, config.unit

    def check(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> None:
        """It is a projection, and every rank gets outputs."""
        expect_linear(name, module, "column")
        expect_shares(name, "outputs", int(module.out_features), self.unit, sizes[TENSOR])  # type: ignore[arg-type]

    def cut(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> ParameterCuts:
        """Weight and bias along their first dimension."""
        return {key: (TENSOR, EvenCut(0, self.unit)) for key in ("weight", "bias") if getattr(module, key) is not None}

    def apply(self, name: str, module: nn.Module, groups: Groups) -> None:
        """Nothing, but for a projection that gathers for itself."""
        comm = groups(TENSOR)
        if self.gather and comm.size > 1:
            wrap(module, _gathering, comm, name, module)


def _gathering(comm: Communicator, name: str, module: nn.Module, forward: Callable[[Tensor], Tensor], x_BSI: Tensor) -> Tensor:
    entry = getattr(module, OVERLAP, None)
    if entry is not None and entry.usable((x_BSI,)):
        product: Tensor = entry.alone(name, module, x_BSI)
        return product
    return forward(gather_tree(x_BSI, comm, name))


def build(config: ColumnConfig) -> Column:
    """The entry's target."""
    return Column(config)
