"""What a model may ask of the ranks that share its work, by logical axes: models and losses name no mesh axis and no group.

The axes are `sequence` (the ranks that hold parts of the same rows) and `batch` (those that hold different rows). A paralleliser installs what they mean;
where none has, this process is alone on each.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

Axis = Literal["sequence", "batch"]

_ALONE: tuple[Callable[[Tensor], Tensor], int] = (lambda x: x, 1)


class _State(threading.local):
    """Of a thread, so that tests may run ranks as threads; a thread that has nothing of its own (autograd's, for a device) begins with the newest."""

    newest: ClassVar[dict[str, Any]] = {"axes": {}, "complete": None, "open": None}

    def __getattr__(self, name: str) -> Any:
        return self.newest[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = self.newest[name] = value


_state = _State()


def install(
    axes: Mapping[Axis, tuple[Callable[[Tensor], Tensor], int]], complete: Callable[[dict[str, Tensor]], None] | None = None
) -> None:
    """Say what the axes mean: for each a function that sums a tensor over its ranks (in backward it sums the gradients, its true adjoint), and how many
    ranks there are. `complete` is called with the sums of each micro-batch at its end: it adds up, in place, those of ranks whose sums are to be
    equal (along tp). Stability: provisional."""
    _state.axes, _state.complete, _state.open = dict(axes), complete, None


def reset() -> None:
    """This process is alone again. Stability: provisional."""
    install({})


def sum(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """`x` summed over the ranks of `axes`; backward sums the gradients likewise. A collective. Stability: provisional."""
    for axis in axes:
        x = _state.axes.get(axis, _ALONE)[0](x)
    return x


def ranks(axes: Sequence[Axis]) -> int:
    """How many ranks there are along `axes` together. Stability: provisional."""
    return math.prod(_state.axes.get(axis, _ALONE)[1] for axis in axes)


@contextlib.contextmanager
def micro_batch(scale: float) -> Iterator[dict[str, Tensor]]:
    """Around forward and backward of one micro-batch, by engines. `scale` is what its losses are multiplied by in backward. Yields the sums that
    `add_loss` and `record` add to. Stability: provisional."""
    sums: dict[str, Tensor] = {}
    before, _state.open = _state.open, (scale, sums)
    try:
        yield sums
        if _state.complete is not None:
            _state.complete(sums)
    finally:
        _state.open = before


def add_loss(x: Tensor, name: str, value: Tensor) -> Tensor:
    """`x`, through which backward also differentiates the further loss `value`, a scalar: this rank's share of a sum over tokens, as the main loss is.

    It is recorded under `name`. Outside of `micro_batch` nothing happens. Stability: provisional.
    """
    record(name, value)
    opened = _state.open
    return x if opened is None or not torch.is_grad_enabled() else _AddLoss.apply(x, value, opened[0])


def record(name: str, value: Tensor) -> None:
    """Add `value`, a scalar and this rank's share of a sum over tokens, to the micro-batch's sums. Not when forward is recomputed. Stability: provisional."""
    opened = _state.open
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
