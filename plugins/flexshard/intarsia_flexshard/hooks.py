"""What the runtime's hooks need to know of modules' calls."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from intarsia_flexshard.bucket import Bucket


def in_backward() -> bool:
    """Whether autograd is running on this thread: a forward call then is a recomputation by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """`hook`, left out where torch.compile traces around it. The usual decorator would cost every call more than the hook does."""
    disabled = torch.compiler.disable(hook)

    def run(*arguments: Any) -> None:
        (disabled if torch.compiler.is_dynamo_compiling() else hook)(*arguments)

    return run


class Inputs:
    """What a call was given, as nodes of autograd's graph; to be held by what the call computed, and by nothing that the inputs hold."""

    __slots__ = ("__weakref__", "nodes")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.nodes = [tensor.grad_fn or torch.autograd.graph.get_gradient_edge(tensor).node for tensor in tensors]


def after_parameters(tensor: Tensor, then: Callable[..., None]) -> Callable[..., None]:
    """`then`, to be called when the gradient of `tensor` is known, and not before parameters have theirs that the same operation made.

    Autograd takes leaves in any order. Of another tensor it goes on after all leaves that are known by then; where `tensor` is a leaf (what a pipeline stage received),
    `then` waits for the end of the backward pass.
    """
    if not tensor.is_leaf:
        return then
    return lambda: torch.autograd.Variable._execution_engine.queue_callback(then)  # type: ignore[attr-defined]


def when_known(tensors: Sequence[Tensor], then: Callable[..., None]) -> Inputs:
    """Call `then` once in each backward pass that reaches one of the tensors, when all of their gradients that it computes are known; of a single tensor `then` may be given the gradient.

    Unlike torch's `register_multi_grad_hook` the hooks hold no nodes: where one tensor was made from another, that would be a cycle through the graph, and
    keep all of it alive until the garbage collector runs. Whoever holds the result decides; once it is gone nothing that the call computed can be in a
    backward pass, and `then` is called at the first gradient.
    """
    found = Inputs(tensors)
    if len(tensors) == 1:
        last = after_parameters(tensors[0], then) if tensors[0].is_leaf else None
        tensors[0].register_hook(then if last is None else lambda gradient: last())
        return found
    known = weakref.ref(found)
    task, missing = -1, 0

    def arrived(last: Callable[[], None], gradient: Tensor) -> None:
        nonlocal task, missing
        current = torch._C._current_graph_task_id()
        if current != task:
            inputs = known()
            task, missing = current, sum(map(torch._C._will_engine_execute_node, inputs.nodes)) if inputs is not None else 1
        missing -= 1
        if not missing:
            last()

    for tensor in tensors:
        tensor.register_hook(functools.partial(arrived, after_parameters(tensor, then)))
    return found


def handled() -> int:
    """Which exception is being handled, if any."""
    return id(sys.exception())


class Call:
    """One forward call of a module that drives `bucket`. Calls are numbered as they begin; those up to `end` have begun within this one. `epoch` counts updates before it, `handled` is the exception that was being handled then;
    `is_again` says that it is a recomputation.

    `is_left` says that the backward pass that has entered the call has left it again. What the call computed holds it, and nothing that it was given does: so a
    call that can have no backward pass any more is gone. `reference` is what its bucket's `pending` holds of it.
    """

    __slots__ = ("__weakref__", "bucket", "end", "epoch", "handled", "is_again", "is_hidden", "is_left", "number", "reference")

    def __init__(self, bucket: Bucket, number: int, epoch: int, is_again: bool) -> None:
        self.is_again = is_again
        self.bucket, self.number, self.epoch, self.handled = bucket, number, epoch, id(sys.exception())
        self.is_left = self.is_hidden = False
        self.end = number
        self.reference: weakref.ref[Call] | None = None


def differentiable(values: Iterable[Any], found: list[Tensor] | None = None) -> list[Tensor]:
    """The tensors that require gradients among `values` and in nested tuples, lists, dicts and dataclasses, each once; added to `found`."""
    found = [] if found is None else found
    for value in values:
        if isinstance(value, Tensor):
            if value.requires_grad and not (found and any(value is other for other in found)):
                found.append(value)
        elif isinstance(value, (tuple, list)):
            differentiable(value, found)
        elif isinstance(value, dict):
            differentiable(value.values(), found)
        elif hasattr(type(value), "__dataclass_fields__"):
            differentiable([getattr(value, field.name) for field in dataclasses.fields(value)], found)
    return found
