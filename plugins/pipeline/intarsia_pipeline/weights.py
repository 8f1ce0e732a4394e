"""Backward in two: the gradients of a stage's inputs now (I), those of its matrices later (W). Torch.

Operators that multiply by a weight are replaced, while a forward runs under `deferring`, by ones whose backward gives the gradient of the input alone and puts the rest
into a queue. Running the queue adds the weights' gradients to the parameters' `.grad`, as autograd would have. What is no such operator, and weights that are
no leaves of the graph, get their gradients with the inputs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    call.inner = operator.choice.function  # type: ignore[attr-defined]
    if hasattr(operator.choice.function, "weight_gradient"):
        call.weight_gradient = operator.choice.function.weight_gradient  # type: ignore[attr-defined, union-attr]
    call.prepare = inner.prepare  # type: ignore[attr-defined]
    return call


class _Deferred(torch.autograd.Function):
    """The operator with a graph of its own inside that knows of no weight: backward goes through it for the inputs, and puts the weight off."""

    @staticmethod
    def forward(ctx: Any, operator: ops.Operator, queue: Queue, weight: Tensor, named: dict[str, Any], x: Tensor, *rest: Any) -> Tensor:
        with torch.enable_grad():
            inner = [_apart(each) for each in (x, *rest)]
            result = operator(inner[0], weight.detach(), *inner[1:], **named)
        # The edge, and not the result, whose memory nobody needs.
        ctx.edge = torch.autograd.graph.get_gradient_edge(result) if result.requires_grad else None
        # Saved as autograd saves, so that recomputation may bring it back.
        ctx.save_for_backward(x)
        ctx.inner, ctx.queue, ctx.operator, ctx.weight, ctx.rest = inner, queue, operator, weight, (rest, named)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        inner, operator, weight, (rest, named) = ctx.inner, ctx.operator, ctx.weight, ctx.rest
        (x,) = ctx.saved_tensors
        gradient = grads[0]
        wanted = [each for each in inner if isinstance(each, Tensor) and each.requires_grad]
        found = iter(torch.autograd.grad(ctx.edge, wanted, gradient, allow_unused=True) if wanted else ())

        def later() -> None:
            mine = weight_gradient(operator, gradient, x, weight, rest, named).to(weight.dtype)
            if weight.grad is None:
                weight.grad = mine
            else:
                weight.grad.add_(mine)

        ctx.queue.append(later)
        # What the queue does not need goes with this node.
        ctx.edge = ctx.inner = None
        given = [next(found) if isinstance(each, Tensor) and each.requires_grad else None for each in inner]
        return (None, None, None, None, *given)


def weight_gradient(
    operator: ops.Operator, gradient: Tensor, x: Tensor, weight: Tensor, rest: Sequence[Any], named: Mapping[str, Any]
) -> Tensor:
    """The gradient of the operator's weight, of its shape.

    `y = x W^T` gives it by one product. Products in groups give it by `weight_gradient(gradient, x, counts)`, an attribute of the function that is in force or of the reference. Without one
    the forward is computed again.
    """
    if operator.name in ("linear", "scaled_linear"):
        return gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    by = ops.operators().get("grouped_linear", operator)
    product = next((each for each in (_inner_of(by.choice.function), by.reference) if hasattr(each, "weight_gradient")), None)
    counts = named.get("counts_E", next((each for each in rest if isinstance(each, Tensor) and each.dtype == torch.int64), None))
    if product is not None and counts is not None:
        found: Tensor = product.weight_gradient(gradient.contiguous(), x, counts)  # type: ignore[union-attr]
        return found
    with torch.enable_grad():
        leaf = weight.detach().requires_grad_()
        result = operator(x.detach(), leaf, *(each.detach() if isinstance(each, Tensor) else each for each in rest), **named)
    return torch.autograd.grad(result, leaf, gradient)[0]


def _inner_of(function: Any) -> Any:
    """What was in force before the operator was made able to defer."""
    return getattr(function, "inner", function)


def _apart(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
