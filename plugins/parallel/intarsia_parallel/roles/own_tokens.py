"""own_tokens: what a module says of all tokens of a row, which every rank knows, becomes what it says of the rank's own part of them.

For modules without parameters that read the batch and not the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from intarsia.comm import Communicator
from intarsia.errors import UsageError
from torch import nn

from intarsia_parallel.collectives import even_counts, own_part
from intarsia_parallel.roles.common import TENSOR, Groups, ParameterCuts, map_tensors, wrap


class OwnTokens:
    """See the module."""

    def check(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> None:
        """It has no parameters, whose gradients nobody would know to sum."""
        if any(True for _ in module.parameters()):
            raise UsageError(
                f"{name} has the role own_tokens, which is for modules without parameters; it is a {type(module).__name__} with some."
            )

    def cut(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> ParameterCuts:
        """Nothing."""
        return {}

    def apply(self, name: str, module: nn.Module, groups: Groups) -> None:
        """Cut the result along its dimension 1."""
        comm = groups(TENSOR)
        if comm.size > 1:
            wrap(module, _cut, comm)


def _cut(comm: Communicator, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return map_tensors(forward(*args, **kwargs), lambda x: own_part(x, 1, even_counts(x.shape[1], comm.size), comm))
