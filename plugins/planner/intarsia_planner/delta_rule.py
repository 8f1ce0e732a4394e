"""What stands in for a kernel of `gated_delta_rule`: five launches, and of every chunk what its backward reads. Shape suffixes: B rows, S tokens, H heads, K key dim, V value dim, N chunks of all
rows, C tokens of a chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 64
FACTORS = 9
"""float32 numbers of each token of a chunk and head that are kept beside products; `intarsia_kernels.delta_rule.prepare` lists them."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("intarsia_planner::delta_rule", mutates_args=())
def forward(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, decay_BSH: Tensor, beta_BSH: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, the state, each chunk's state and what its tokens write, its two triangles, and factors."""
    return _shapes(k_BSHK, v_BSHV, keep)


@forward.register_fake
def _(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, decay_BSH: Tensor, beta_BSH: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _shapes(k_BSHK, v_BSHV, keep)


def _shapes(k_BSHK: Tensor, v_BSHV: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, tokens, heads, width = k_BSHK.shape
    values = v_BSHV.shape[-1]
    chunks = rows * -(-tokens // CHUNK)
    return (
        torch.empty_like(v_BSHV),
        v_BSHV.new_empty(rows, heads, width, values, dtype=torch.float32),
        v_BSHV.new_empty(chunks if keep else 0, heads, width, values),
        v_BSHV.new_empty(chunks if keep else 0, heads, values, CHUNK),
        k_BSHK.new_empty(chunks, heads, CHUNK, CHUNK),
        k_BSHK.new_empty(chunks, heads, CHUNK, CHUNK),
        k_BSHK.new_empty(chunks, heads, FACTORS, CHUNK, dtype=torch.float32),
    )


@torch.library.custom_op("intarsia_planner::delta_rule_backward", mutates_args=())
def backward(dy_BSHV: Tensor, q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, decay_BSH: Tensor, beta_BSH: Tensor) -> list[Tensor]:
    """Gradients of the inputs."""
    return [torch.empty_like(x) for x in (q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH)]


@backward.register_fake
def _(dy_BSHV: Tensor, q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, decay_BSH: Tensor, beta_BSH: Tensor) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], *output[2:])


def _gradients(ctx: Any, dy_BSHV: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return (*backward(dy_BSHV, *ctx.saved_tensors[:5]), None)


forward.register_autograd(_gradients, setup_context=_keep)


def gated_delta_rule(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    beta_BSH: Tensor,
    state_BHKV: Tensor | None = None,
    *_: Any,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """As the operator. What comes in as a state has its gradient by way of the result's."""
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH))
    y_BSHV, after_BHKV, *_kept = forward(q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH, keep)
    return y_BSHV, after_BHKV if state_BHKV is None else after_BHKV + state_BHKV


def products(k_BSHK: Tensor, v_BSHV: Tensor, is_backward: bool) -> list[tuple[tuple[int, int, int], int]]:
    """(m, n, k) and how often, as the kernel has them."""
    rows, tokens, heads, width = k_BSHK.shape
    values, chunks = v_BSHV.shape[-1], rows * -(-tokens // CHUNK) * heads
    if not is_backward:  # q k^T and k k^T; k S, q S and k^T n; T x and P n
        counts = (2, 3, 2, 0)
    else:  # dP q, dP^T k, dA k and dA^T k; with S and dS: k, q, dy, dv, dx and n; P^T dy and T^T dn; dP and dA, by rows and by columns
        counts = (4, 6, 2, 4)
    shapes = ((CHUNK, CHUNK, width), (CHUNK, values, width), (CHUNK, values, CHUNK), (CHUNK, CHUNK, values))
    return [(shape, count * chunks) for shape, count in zip(shapes, counts, strict=True) if count]
