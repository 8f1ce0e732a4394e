"""Backward in two: the gradients of a stage's inputs now (I), those of its matrices later (W). Torch.

Operators that multiply by a weight are replaced, while a forward runs under `deferring`, by ones whose backward gives the gradient of the input alone and puts the rest
into a queue. Running the queue adds the weights' gradients to the parameters' `.grad`, as autograd would have. What is no such operator, and weights that are
no leaves of the graph, get their gradients with the inputs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from intarsia import ops
from torch import Tensor

# Operators of the form (x, weight, ...): the gradient of the weight is put off.
DEFERRED = ("linear", "scaled_linear", "grouped_linear", "scaled_grouped_linear")

Queue = list[Callable[[], None]]


class _Current:
    """The queue of the forward that is running: of this thread, or of the newest where a thread (autograd's, for a device) has none."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._newest: Queue | None = None

    def get(self) -> Queue | None:
        return getattr(self._own, "queue", self._newest)

    def put(self, queue: Queue | None) -> None:
        self._own.queue = self._newest = queue


_current = _Current()


@contextlib.contextmanager
def deferring(queue: Queue | None) -> Iterator[None]:
    """While active, backward of what forward computes puts its weights' gradients into `queue`. None: nothing changes. Around backward as well, where forward is computed again."""
    before = _current.get()
    _current.put(queue)
    try:
        yield
    finally:
        _current.put(before)


def run(queue: Queue) -> None:
    """Compute the gradients that were put off, in the order in which backward reached them."""
    with torch.no_grad():
        while queue:
            queue.pop(0)()


def install() -> None:
    """Make the operators that are in force able to defer. Once is enough; operators that are chosen anew afterwards are taken up by another call."""
    for name, operator in ops.operators().items():
        if name in DEFERRED and not getattr(operator.choice.function, "defers", False):
            operator.put(ops.Choice(operator.choice.kernel, operator.choice.reason, _deferring_form(operator)))


def _deferring_form(operator: ops.Operator) -> Callable[..., Any]:
    inner = ops.Operator(operator.name, operator.reference, operator.sort, operator.invariant)  # type: ignore[arg-type]
    inner.put(operator.choice)

    def call(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Any:
        queue = _current.get()
        if queue is None or not torch.is_grad_enabled() or not (weight.requires_grad and weight.is_leaf):
            return inner(x, weight, *rest, **named)
        return _Deferred.apply(inner, queue, weight, named, x, *rest)

    call.defers = True  # type: ignore[attr-defined]
    call.prepare = inner.prepare  # type: ignore[attr-defined]
    return call


class _Deferred(torch.autograd.Function):
    """The operator with a graph of its own inside, which backward goes through twice: for the inputs, and later for the weight."""

    @staticmethod
    def forward(ctx: Any, operator: ops.Operator, queue: Queue, weight: Tensor, named: dict[str, Any], x: Tensor, *rest: Any) -> Tensor:
        with torch.enable_grad():
            inner = [_apart(each) for each in (x, *rest)]
            inner_weight = weight.detach().requires_grad_()
            result = operator(inner[0], inner_weight, *inner[1:], **named)
        # The edge, and not the result, whose memory nobody needs.
        ctx.edge = torch.autograd.graph.get_gradient_edge(result)
        ctx.inner, ctx.inner_weight, ctx.weight, ctx.queue = inner, inner_weight, weight, queue
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        edge, inner, inner_weight, weight = ctx.edge, ctx.inner, ctx.inner_weight, ctx.weight
        gradient = grads[0]
        wanted = [each for each in inner if isinstance(each, Tensor) and each.requires_grad]
        found = iter(torch.autograd.grad(edge, wanted, gradient, retain_graph=True, allow_unused=True) if wanted else ())

        def later() -> None:
            (mine,) = torch.autograd.grad(edge, inner_weight, gradient, allow_unused=True)
            if mine is None:
                return
            if weight.grad is None:
                weight.grad = mine
            else:
                weight.grad.add_(mine)

        ctx.queue.append(later)
        # What the queue does not need goes with this node.
        ctx.edge = ctx.inner = ctx.inner_weight = None
        given = [next(found) if isinstance(each, Tensor) and each.requires_grad else None for each in inner]
        return (None, None, None, None, *given)


def _apart(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
