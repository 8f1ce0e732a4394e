"""sequence: works on the own part of the sequence with whole parameters: norms, routers, residual streams, low-rank projections.

Inside a region, which has all tokens, it does nothing either. Gradients: partial sums along tp, each rank's tokens' share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from intarsia.comm import Communicator
from torch import nn

from intarsia_parallel.config import SequenceConfig
from intarsia_parallel.roles.common import TENSOR, Groups, ParameterCuts, gather_tree, wrap


class Sequence:
    """See the module."""

    def __init__(self, config: SequenceConfig) -> None:
        self.gather = config.gather

    def check(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> None:
        """Any module will do."""

    def cut(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> ParameterCuts:
        """Nothing."""
        return {}

    def apply(self, name: str, module: nn.Module, groups: Groups) -> None:
        """Nothing, or gather what comes out."""
        comm = groups(TENSOR)
        if self.gather and comm.size > 1:
            wrap(module, _gathered, comm, name)


def _gathered(comm: Communicator, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return gather_tree(forward(*args, **kwargs), comm, name)


def build(config: SequenceConfig) -> Sequence:
    """The entry's target."""
    return Sequence(config)
