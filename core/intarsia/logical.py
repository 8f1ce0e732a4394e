"""What a model may ask of the ranks that share its work, by logical axes: models and losses name no mesh axis and no group.

The axes are `sequence` (the ranks that hold parts of the same rows) and `batch` (those that hold different rows). A paralleliser installs what they mean;
where none has, this process is alone on each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Axis = Literal["sequence", "batch"]


@dataclasses.dataclass
class _State:
    axes: dict[str, tuple[Callable[[Tensor], Tensor], int]] = dataclasses.field(default_factory=dict)
    open: tuple[float, dict[str, Tensor]] | None = None
    complete: Callable[[dict[str, Tensor]], None] | None = None


# Of a thread, so that tests may run ranks as threads; threads that have none of their own (autograd's, for a device) see the newest.
_own = threading.local()
_newest = _State()


def _mine() -> _State:
    global _newest
    if not hasattr(_own, "state"):
        _own.state = _newest = _State()
    return _own.state


def install(
    axes: Mapping[Axis, tuple[Callable[[Tensor], Tensor], int]], complete: Callable[[dict[str, Tensor]], None] | None = None
) -> None:
    """Say what the axes mean: for each a function that sums a tensor over its ranks (in backward it sums the gradients, its true adjoint), and how many
    ranks there are. `complete` is called with the sums of each micro-batch at its end: it adds up, in place, those of ranks whose sums are to be
    equal (along tp). Stability: provisional."""
    _mine().axes, _mine().complete = dict(axes), complete


def reset() -> None:
    """This process is alone again. Stability: provisional."""
    install({})


def sum(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """`x` summed over the ranks of `axes`; backward sums the gradients likewise. A collective. Stability: provisional."""
    state = getattr(_own, "state", _newest)
    for axis in axes:
        x = state.axes[axis][0](x) if axis in state.axes else x
    return x


def ranks(axes: Sequence[Axis]) -> int:
    """How many ranks there are along `axes` together. Stability: provisional."""
    state = getattr(_own, "state", _newest)
    return math.prod(state.axes[axis][1] for axis in axes if axis in state.axes)


@contextlib.contextmanager
def micro_batch(scale: float) -> Iterator[dict[str, Tensor]]:
    """Around forward and backward of one micro-batch, by engines. `scale` is what its losses are multiplied by in backward. Yields the sums that
    `add_loss` and `record` add to. Stability: provisional."""
    state = _mine()
    before, state.open = state.open, (scale, {})
    try:
        yield state.open[1]
        if state.complete is not None:
            state.complete(state.open[1])
    finally:
        state.open = before


def add_loss(x: Tensor, name: str, value: Tensor) -> Tensor:
    """`x`, through which backward also differentiates the further loss `value`, a scalar: this rank's share of a sum over tokens, as the main loss is.

    It is recorded under `name`. Outside of `micro_batch` nothing happens. Stability: provisional.
    """
    record(name, value)
    opened = getattr(_own, "state", _newest).open
    return x if opened is None or not torch.is_grad_enabled() else _AddLoss.apply(x, value, opened[0])


def record(name: str, value: Tensor) -> None:
    """Add `value`, a scalar and this rank's share of a sum over tokens, to the micro-batch's sums. Not when forward is recomputed. Stability: provisional."""
    opened = getattr(_own, "state", _newest).open
    # A graph task is under way on this thread: the call comes from a recomputation in backward.
    if opened is not None and torch._C._current_graph_task_id() == -1:
        sums, value = opened[1], value.detach()
        sums[name] = sums[name] + value if name in sums else value


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, (value.shape, value.dtype, value.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        shape, dtype, device = ctx.like
        return grads[0], torch.full(shape, ctx.scale, dtype=dtype, device=device), None
