"""What the roles share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from intarsia import ops
from intarsia.comm import Communicator
from intarsia.contracts import Placement
from intarsia.errors import UsageError
from intarsia_models_common.build import Linear
from intarsia_models_common.scaled_linear import scaled_linear
from torch import Tensor, nn

from intarsia_parallel import tokens
from intarsia_parallel.collectives import gather

TENSOR = "tp"

# The attribute of a region's, column's or row's module that says that it is overlapped, and by what (`intarsia_parallel.overlap`).
OVERLAP = "tensor_overlap"

ParameterCuts = Mapping[str, tuple[str, Placement]]


class Groups(Protocol):
    """Mesh axes to the group of ranks that differ along them."""

    def __call__(self, *axes: str) -> Communicator: ...


def wrap(module: nn.Module, around: Callable[..., Any], *bound: Any) -> None:
    """`module.forward(...)` becomes `around(*bound, forward, ...)`. Hooks stay outside, and so do compilation and recomputation, which come later."""
    module.forward = functools.partial(around, *bound, module.forward)  # type: ignore[method-assign]


def divisors(n: int) -> list[int]:
    """The divisors of `n`, rising."""
    return [each for each in range(1, n + 1) if n % each == 0]


def nearest(wanted: int, legal: list[int]) -> str:
    """The legal values around `wanted`, as messages name them."""
    below, above = [each for each in legal if each < wanted], [each for each in legal if each > wanted]
    return " or ".join(str(each) for each in (*below[-1:], *above[:1]))


def expect_linear(name: str, module: nn.Module, role: str) -> None:
    """UsageError unless `module` is a projection whose weight is [outputs, inputs]."""
    if not isinstance(module, nn.Linear):
        raise UsageError(f"{name} has the role {role}, which is for nn.Linear and what derives from it; it is a {type(module).__name__}.")


def expect_shares(name: str, what: str, length: int, unit: int, ranks: int) -> None:
    """UsageError unless every rank gets a unit."""
    units = -(-length // unit)
    if units < ranks:
        in_units = f" in units of {unit}: {units}" if unit > 1 else ""
        raise UsageError(f"{name} has {length} {what}{in_units}, too few for tp={ranks}. The most is tp={max(units, 1)}.")


def has_payload(module: nn.Module) -> bool:
    """Whether a sharder has put the weight's float8 beside it: the weight itself must not be read then."""
    return getattr(module, "weight_payload", None) is not None


def is_plain(module: nn.Module) -> bool:
    """Whether the module computes x W^T (+ b) and nothing else."""
    return type(module).forward in (nn.Linear.forward, Linear.forward)


def product_without_bias(module: Any, forward: Callable[[Tensor], Tensor], x_NI: Tensor) -> Tensor:
    """x W^T by the module's own means."""
    if module.bias is None:
        return forward(x_NI)
    if has_payload(module):
        return scaled_linear(x_NI, module.weight, module.weight_payload, module.weight_scales, None, module.weight_tile)
    return ops.linear(x_NI, module.weight, None)


@torch.compiler.disable
def gather_tree(value: Any, comm: Communicator, name: str) -> Any:
    """Every tensor in a tree of tuples, lists and dicts, gathered along the sequence (dimension 1)."""
    return map_tensors(value, lambda x: gather(x, 1, tokens.checked_counts(x, 1, comm, name), comm, name))


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`function` of every tensor in a tree of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        made = [map_tensors(each, function) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        return {key: map_tensors(each, function) for key, each in value.items()}
    return value
