"""Rows to their experts and back: the references of `sort_pairs`, `permute` and `combine`. N tokens, K experts of a token, M rows for experts, D model width.

A *pair* is the k-th choice of token n, numbered n K + k. `pairs_M` says which pair each row serves, -1 for a row of the tail; `places_NK` says which row serves
each pair, -1 for a pair that was dropped. Each is the other's inverse. Rows of the tail hold what nobody has written: they are never read, and written as 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sort_pairs(experts_NK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs sorted by expert (int64, from 0 to `experts` - 1), those of one expert in the order of tokens: `pairs_M` and `places_NK`, how many each expert has [E], and where each
    expert's begin and the last's end [E + 1], all int64. Waits for nothing."""
    flat_M = experts_NK.flatten()
    # Few bits to sort by; one number beyond the experts must fit.
    keys_M, pairs_M = torch.sort(flat_M.to(torch.int16 if experts < 2**15 - 1 else torch.int64), stable=True)
    numbers = torch.arange(experts + 1, device=flat_M.device, dtype=keys_M.dtype)
    bounds_E1 = torch.searchsorted(keys_M, numbers)
    # Every pair has its place: nothing is left to mark, other than in `dispatch.invert`.
    places_M = torch.empty_like(pairs_M).scatter_(0, pairs_M, torch.arange(pairs_M.shape[0], device=pairs_M.device))
    return pairs_M, places_M.view(experts_NK.shape), bounds_E1.diff(), bounds_E1


def take(x_ND: Tensor, index_M: Tensor) -> Tensor:
    """Rows of x, 0 where the index is negative."""
    if not x_ND.shape[0]:
        return x_ND.new_zeros(index_M.shape[0], x_ND.shape[1])
    absent_M = index_M < 0
    if index_M.device.type == "cpu" and not bool(absent_M.any()):
        return x_ND.index_select(0, index_M)
    return x_ND.index_select(0, index_M.clamp_min(0)).masked_fill_(absent_M[:, None], 0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _sum_of_places(y_MD: Tensor, places_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    """[N, D]: the sum over k of y[places] (times the weight), summed in float32 and in the order of k."""
    wide = _wide(y_MD.dtype)
    total_ND = torch.zeros(places_NK.shape[0], y_MD.shape[1], dtype=wide, device=y_MD.device)
    for k in range(places_NK.shape[1]):
        part_ND = take(y_MD, places_NK[:, k]).to(wide)
        if weights_NK is None:
            total_ND += part_ND
        else:
            total_ND.addcmul_(part_ND, weights_NK[:, k, None].to(wide))
    return total_ND.to(y_MD.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, pairs_M: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(places_NK)
        return take(x_ND, pairs_M.div(places_NK.shape[1], rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places_NK,) = ctx.saved_tensors
        return _sum_of_places(grads[0], places_NK, None), None, None


def permute(x_ND: Tensor, pairs_M: Tensor, places_NK: Tensor) -> Tensor:
    """[M, D]: row m is the row of x of the token that pair `pairs_M[m]` is of, 0 in the tail. The gradient of a token is the sum over its rows, in float32."""
    return _Permute.apply(x_ND, pairs_M, places_NK)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, weights_NK: Tensor, pairs_M: Tensor, places_NK: Tensor) -> Tensor:
        ctx.save_for_backward(y_MD, weights_NK, pairs_M, places_NK)
        return _sum_of_places(y_MD, places_NK, weights_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y_MD, weights_NK, pairs_M, places_NK = ctx.saved_tensors
        grad_ND, wide = grads[0], _wide(y_MD.dtype)
        grad_y = grad_weights = None
        if ctx.needs_input_grad[0]:
            scale_M1 = take(weights_NK.reshape(-1, 1), pairs_M).to(wide)
            rows_MD = take(grad_ND, pairs_M.div(places_NK.shape[1], rounding_mode="floor")).to(wide)
            grad_y = (rows_MD * scale_M1).to(y_MD.dtype)
        if ctx.needs_input_grad[1]:
            columns = [(take(y_MD, places_NK[:, k]).to(wide) * grad_ND).sum(-1) for k in range(places_NK.shape[1])]
            grad_weights = torch.stack(columns, 1).to(weights_NK.dtype)
        return grad_y, grad_weights, None, None


def combine(y_MD: Tensor, weights_NK: Tensor, pairs_M: Tensor, places_NK: Tensor) -> Tensor:
    """[N, D]: the sum over k of `weights_NK[n, k]` times row `places_NK[n, k]` of y, summed in float32; a dropped pair adds nothing and its weight has the gradient 0."""
    return _Combine.apply(y_MD, weights_NK, pairs_M, places_NK)
