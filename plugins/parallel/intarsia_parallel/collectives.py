"""Collectives that autograd sees: each one's backward is its exact adjoint.

A value that differs over the ranks is a partial one, and the meaning of a program is the sum of all ranks' losses, except where a docstring says
*replicated*: there every rank holds the same value and hands back the same gradient. `counts` are the sizes of the ranks' parts along a dimension, in rank
order; they may be uneven and 0. In a group of one every function is the identity. All ranks of a group make the same calls in the same order.

torch.compile breaks its graph at each of them: communication is never traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from intarsia.comm import Communicator
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def _untraced(function: Function) -> Function:
    return cast(Function, torch.compiler.disable(function))


def even_counts(n: int, ranks: int) -> list[int]:
    """`n` things shared out over `ranks` as evenly as can be; the first ranks have one more where it does not come out even. Stability: provisional."""
    least, more = divmod(n, ranks)
    return [least + (rank < more) for rank in range(ranks)]


# ---------------------------------------------------------------- along a dimension


@_untraced
def gather(x: Tensor, dim: int, counts: Sequence[int], comm: Communicator, what: str = "gather") -> Tensor:
    """All parts along `dim`, in rank order. Backward: the sum over the ranks of the gradients, own part (`scatter_sum`). Stability: provisional."""
    return x if comm.size == 1 else _Gather.apply(x, dim % x.ndim, tuple(counts), comm, what)


@_untraced
def scatter_sum(x: Tensor, dim: int, counts: Sequence[int], comm: Communicator, what: str = "scatter_sum") -> Tensor:
    """The sum over the ranks of their `x`, own part along `dim`. Backward: all parts of the gradient (`gather`). Stability: provisional."""
    return x if comm.size == 1 else _ScatterSum.apply(x, dim % x.ndim, tuple(counts), comm, what)


@_untraced
def gather_replicated(x: Tensor, dim: int, counts: Sequence[int], comm: Communicator, what: str = "gather") -> Tensor:
    """All parts along `dim`; the result is *replicated*: all ranks go on alike. Backward: the gradient's own part. Stability: provisional."""
    return x if comm.size == 1 else _GatherReplicated.apply(x, dim % x.ndim, tuple(counts), comm, what)


def own_part(x: Tensor, dim: int, counts: Sequence[int], comm: Communicator) -> Tensor:
    """The own part of `x`, which all ranks have: a view. Backward: zeros elsewhere, a partial gradient. Stability: provisional."""
    return x.narrow(dim, sum(counts[: comm.rank]), counts[comm.rank])


def gathered(x: Tensor, dim: int, counts: Sequence[int], comm: Communicator, what: str) -> Tensor:
    """What `gather` computes, without a gradient. Stability: provisional."""
    dim = dim % x.ndim
    rest = x.numel() // counts[comm.rank] if counts[comm.rank] else math.prod(n for i, n in enumerate(x.shape) if i != dim)
    flat = comm.gather_v(x.contiguous().view(-1), [count * rest for count in counts], what)
    shapes = [(*x.shape[:dim], count, *x.shape[dim + 1 :]) for count in counts]
    if math.prod(x.shape[:dim]) == 1:
        return flat.view(*x.shape[:dim], sum(counts), *x.shape[dim + 1 :])
    parts = flat.split([math.prod(shape) for shape in shapes])
    return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)


def scattered(x: Tensor, dim: int, counts: Sequence[int], comm: Communicator, what: str) -> Tensor:
    """What `scatter_sum` computes, without a gradient. Stability: provisional."""
    dim = dim % x.ndim
    rest = math.prod(n for i, n in enumerate(x.shape) if i != dim)
    if math.prod(x.shape[:dim]) == 1:
        flat = x.contiguous().view(-1)
    else:
        flat = torch.cat([part.reshape(-1) for part in x.split(list(counts), dim)])
    own = comm.reduce_scatter_v(flat, [count * rest for count in counts], "sum", what)
    return own.view(*x.shape[:dim], counts[comm.rank], *x.shape[dim + 1 :])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, counts: tuple[int, ...], comm: Communicator, what: str) -> Tensor:
        ctx.call = (dim, counts, comm, f"{what}, backward")
        return gathered(x, dim, counts, comm, what)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return scattered(grads[0], *ctx.call), None, None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, counts: tuple[int, ...], comm: Communicator, what: str) -> Tensor:
        ctx.call = (dim, counts, comm, f"{what}, backward")
        return scattered(x, dim, counts, comm, what)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return gathered(grads[0], *ctx.call), None, None, None, None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, counts: tuple[int, ...], comm: Communicator, what: str) -> Tensor:
        ctx.call = (dim, counts, comm)
        return gathered(x, dim, counts, comm, what)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return own_part(grads[0], *ctx.call), None, None, None, None


# ---------------------------------------------------------------- sums


@_untraced
def sum_forward(x: Tensor, comm: Communicator, what: str = "sum") -> Tensor:
    """The sum over the ranks, *replicated*. Backward: the gradient as it is. Stability: provisional."""
    return x if comm.size == 1 else _Sum.apply(x, comm, True, False, what)


@_untraced
def sum_backward(x: Tensor, comm: Communicator, what: str = "sum") -> Tensor:
    """`x`, which is replicated and of which the ranks go on to compute different things. Backward: the gradients' sum. Stability: provisional."""
    return x if comm.size == 1 else _Sum.apply(x, comm, False, True, what)


@_untraced
def sum_both(x: Tensor, comm: Communicator, what: str = "sum") -> Tensor:
    """The sum over the ranks, of which each makes something of its own. Backward: the gradients' sum. Stability: provisional."""
    return x if comm.size == 1 else _Sum.apply(x, comm, True, True, what)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, forward: bool, backward: bool, what: str) -> Tensor:
        ctx.comm, ctx.sums, ctx.what = comm, backward, f"{what}, backward"
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format), "sum", what) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad = grads[0]
        if ctx.sums:
            grad = ctx.comm.all_reduce(grad.clone(memory_format=torch.contiguous_format), "sum", ctx.what)
        return grad, None, None, None, None


# ---------------------------------------------------------------- rows from rank to rank


@_untraced
def exchange(x_ND: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], comm: Communicator, what: str = "exchange") -> Tensor:
    """Rows by rank: the first `send_counts[0]` rows go to rank 0, and so on; the result has rank 0's rows first, `receive_counts[0]` of them. Backward: the
    gradients go the other way round. Rows may have any shape. Stability: provisional."""
    if comm.size == 1:
        return x_ND
    return _Exchange.apply(x_ND, tuple(send_counts), tuple(receive_counts), comm, what)


def exchanged(x_ND: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], comm: Communicator, what: str) -> Tensor:
    """What `exchange` computes, without a gradient. Stability: provisional."""
    width = math.prod(x_ND.shape[1:])
    sends = list(x_ND.contiguous().view(-1).split([count * width for count in send_counts]))
    parts = comm.exchange(sends, [count * width for count in receive_counts], what)
    return torch.cat(parts).view(sum(receive_counts), *x_ND.shape[1:])


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, sends: tuple[int, ...], receives: tuple[int, ...], comm: Communicator, what: str) -> Tensor:
        ctx.call = (receives, sends, comm, f"{what}, backward")
        return exchanged(x_ND, sends, receives, comm, what)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return exchanged(grads[0], *ctx.call), None, None, None, None
