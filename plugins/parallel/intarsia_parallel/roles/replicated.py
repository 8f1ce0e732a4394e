"""replicated: needs all tokens and keeps its parameters whole: every rank computes everything, and takes its own part of the result.

Gradients: each rank's gradient is what its part of the outputs says: a partial sum along tp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from intarsia.comm import Communicator
from torch import nn

from intarsia_parallel.collectives import even_counts, own_part
from intarsia_parallel.config import ReplicatedConfig
from intarsia_parallel.roles.common import TENSOR, Groups, ParameterCuts, map_tensors, wrap
from intarsia_parallel.roles.region import entered


class Replicated:
    """See the module. `gathers_all`: all tokens come in, and nothing inside needs to end that."""

    gathers_all = True

    def __init__(self, config: ReplicatedConfig) -> None:
        self.inputs = config.inputs

    def check(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> None:
        """Any module will do."""

    def cut(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> ParameterCuts:
        """Nothing."""
        return {}

    def apply(self, name: str, module: nn.Module, groups: Groups) -> None:
        """Gather, compute, cut."""
        comm = groups(TENSOR)
        if comm.size > 1:
            wrap(module, _computed_by_all, comm, name, self.inputs, module)


def _computed_by_all(
    comm: Communicator, name: str, inputs: int, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    result = entered(comm, name, inputs, module, forward, *args, **kwargs)
    return map_tensors(result, lambda x: own_part(x, 1, even_counts(x.shape[1], comm.size), comm))


def build(config: ReplicatedConfig) -> Replicated:
    """The entry's target."""
    return Replicated(config)
