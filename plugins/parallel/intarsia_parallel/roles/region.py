"""region: a module that sees all tokens of the row: they are gathered at its entry, and its `row` projections sum and cut them at its end.

Gradients: parameters inside that no row cuts are applied by every rank to all tokens, and each rank's gradient is what its own share of the outputs says: a
partial sum along tp. The gather adds the input's gradients up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from intarsia.comm import Communicator
from torch import nn

from intarsia_parallel.config import RegionConfig
from intarsia_parallel.roles.common import OVERLAP, TENSOR, Groups, ParameterCuts, gather_tree, wrap


class Region:
    """See the module. `is_region`: something inside must end it. `gathers_one`: the gather may be overlapped."""

    is_region = True

    def __init__(self, config: RegionConfig) -> None:
        self.inputs = config.inputs
        self.gathers_one = config.inputs == 1

    def check(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> None:
        """Any module will do."""

    def cut(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> ParameterCuts:
        """Nothing of its own."""
        return {}

    def apply(self, name: str, module: nn.Module, groups: Groups) -> None:
        """Gather the leading arguments."""
        comm = groups(TENSOR)
        if comm.size > 1:
            wrap(module, entered, comm, name, self.inputs, module)


def entered(comm: Communicator, name: str, inputs: int, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward` with its first `inputs` arguments gathered; where the region is overlapped, its columns are computed meanwhile."""
    entry = getattr(module, OVERLAP, None)
    if entry is not None and entry.usable(args):
        return entry.enter(name, forward, args, kwargs)
    # One call for all of them: torch.compile goes on behind a call that it does not trace, but gives up where one stands in a loop.
    return forward(*gather_tree(args[:inputs], comm, name), *args[inputs:], **kwargs)


def build(config: RegionConfig) -> Region:
    """The entry's target."""
    return Region(config)
