"""The references of `gated_delta_rule` (arXiv 2412.06464): step by step, and in chunks by matrix products.

    S_t = e^(g_t) S_(t-1) + b_t k_t (v_t - e^(g_t) S_(t-1)^T k_t)^T,   y_t = S_t^T q_t,   S = 0 before a document's first token

In a chunk of C tokens that S enters, with D_ij = sum of g over j < l <= i and G_i the sum from the chunk's start up to i:

    A_ij = b_i (k_i . k_j) e^(D_ij), j < i;   (I + A) [u | w] = [b v | b e^G k];   v' = u - w S
    y = e^G q S + (q k^T . e^D, j <= i) v';   S <- e^(G_C) S + (e^(D_C) k)^T v'

Pairs of different documents are masked before the exponential; what enters is nothing to tokens of documents that begin in the chunk. D is summed pair by pair and not taken
as a difference of G, which would cancel where decays are strong.

Shape suffixes: B rows, S tokens, H heads, K key dim, V value dim, N chunks, C tokens of a chunk (a second one: the token that is seen).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
import torch.nn.functional as F
from intarsia.errors import UsageError, did_you_mean
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from intarsia_models_common.linear_attention.tokens import real, segments, silenced, wide

Form = Literal["chunked", "recurrent"]
NORM_EPS = 1e-6
"""What the squared length of a query or key is raised by before its root."""
SPAN = 8
"""Chunks between two states that are kept where the rest is recomputed."""


# A loop over chunks or tokens, which tracing would write out, thousands of lines for a long row.
@torch.compiler.disable
def gated_delta_rule(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    beta_BSH: Tensor,
    state_BHKV: Tensor | None = None,
    documents_BS: Tensor | None = None,
    counts_B: Tensor | None = None,
    *,
    scale: float,
    normalise: bool,
    chunk: int = 64,
    form: Form = "chunked",
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, S, H, V] in v's dtype, and the state at the end [B, H, K, V], float32. K and V are any.

    `decay_BSH` is the logarithm g of what is kept of the state, at most 0 (float32), `beta_BSH` how much is written, from 0 to 1. `normalise` makes queries and keys unit vectors first; queries
    are multiplied by `scale`. `state_BHKV` (float32, None: zeros) comes into the first token's document; the recurrence begins anew where `documents_BS` (integers, None: one document)
    changes. `counts_B` (int64, None: all) says how many of each row's tokens are real: those behind leave the state as it was, and their outputs say nothing.

    What is inside is float32, and float64 for float64 inputs. `form` recurrent goes token by token; chunked, by matrix products on `chunk` tokens. `recompute` keeps only some chunks' states for
    backward (kernels keep as little in any case).
    """
    if form not in ("chunked", "recurrent"):
        raise UsageError(f"gated_delta_rule: form is {form!r}. {did_you_mean(form, ('chunked', 'recurrent'))}")
    if chunk < 1:
        raise UsageError(f"gated_delta_rule: chunk is {chunk}; it must be at least 1.")
    dtype = wide(v_BSHV.dtype)
    rows, tokens, heads, width = k_BSHK.shape
    kept_BHKV = v_BSHV.new_zeros(rows, heads, width, v_BSHV.shape[-1], dtype=dtype) if state_BHKV is None else state_BHKV.to(dtype)
    inputs = (q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH)
    if tokens == 0:  # of no tokens the gradients are zeros, not absent
        nothing_BSH1 = sum((x if x is beta_BSH or x is decay_BSH else x.sum(-1) for x in inputs), beta_BSH).unsqueeze(-1)
        return v_BSHV + nothing_BSH1.to(v_BSHV.dtype), kept_BHKV + nothing_BSH1.sum() + v_BSHV.sum()
    run = _chunked if form == "chunked" else _recurrent
    settings = _Settings(scale, normalise, chunk)
    segment_BS, real_BS = segments(documents_BS, counts_B), real(tokens, counts_B)
    span = chunk * SPAN if recompute and torch.is_grad_enabled() else tokens
    outputs = []
    for start in range(0, tokens, span):
        at = slice(start, start + span)
        some = [x[:, at] for x in inputs]
        before_B1 = None if segment_BS is None else segment_BS[:, max(0, start - 1), None]
        masks = [None if x is None else x[:, at] for x in (segment_BS, real_BS)]
        arguments: tuple[Any, ...] = (settings, kept_BHKV, *some, before_B1, *masks)
        if span < tokens:
            y_BSHV, kept_BHKV = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            y_BSHV, kept_BHKV = run(*arguments)
        outputs.append(y_BSHV)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), kept_BHKV


@dataclasses.dataclass(frozen=True)
class _Settings:
    scale: float
    normalise: bool
    chunk: int


def _prepared(
    settings: _Settings, q_BSHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, decay_BSH: Tensor, beta_BSH: Tensor, real_BS: Tensor | None
) -> tuple[Tensor, ...]:
    """The inputs in the wide dtype, normalised and scaled; tokens that are not real write nothing and forget nothing, whatever stands there."""
    dtype = wide(v_BSHV.dtype)
    inputs = tuple(x.to(dtype) for x in (q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH))
    # Values and queries as well, which a share of 0 would do for but where they are not finite.
    q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH = silenced(inputs, real_BS)
    if settings.normalise:
        q_BSHK, k_BSHK = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q_BSHK, k_BSHK))
    return q_BSHK * settings.scale, k_BSHK, v_BSHV, decay_BSH, beta_BSH


def _recurrent(
    settings: _Settings,
    state_BHKV: Tensor,
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    beta_BSH: Tensor,
    before_B1: Tensor | None,
    segment_BS: Tensor | None,
    real_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    inputs = _prepared(settings, q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH, real_BS)
    outputs = []
    begins_BS = None
    if segment_BS is not None and before_B1 is not None:
        begins_BS = torch.cat((before_B1, segment_BS[:, :-1]), 1) != segment_BS
    for t in range(q_BSHK.shape[1]):
        q_BHK, k_BHK, v_BHV, decay_BH, beta_BH = (x[:, t] for x in inputs)
        if begins_BS is not None:
            state_BHKV = state_BHKV.masked_fill(begins_BS[:, t, None, None, None], 0.0)
        state_BHKV = state_BHKV * decay_BH.exp()[..., None, None]
        change_BHV = (v_BHV - torch.einsum("bhk,bhkv->bhv", k_BHK, state_BHKV)) * beta_BH[..., None]
        state_BHKV = state_BHKV + k_BHK[..., None] * change_BHV[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q_BHK, state_BHKV))
    return torch.stack(outputs, 1).to(v_BSHV.dtype), state_BHKV


def _chunked(
    settings: _Settings,
    state_BHKV: Tensor,
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    beta_BSH: Tensor,
    before_B1: Tensor | None,
    segment_BS: Tensor | None,
    real_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    tokens = q_BSHK.shape[1]
    size = min(settings.chunk, tokens)
    inputs = _prepared(settings, q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH, real_BS)
    q_BHNCK, k_BHNCK, v_BHNCV, decay_BHNC, beta_BHNC = (_in_chunks(x, size).movedim(3, 1) for x in inputs)
    later_CC = torch.ones(size, size, dtype=torch.bool, device=q_BSHK.device).triu(1)
    hidden_CC, enters_BHNC = later_CC, decay_BHNC.cumsum(-1).exp()
    if segment_BS is not None and before_B1 is not None:
        # Behind the last token nothing begins.
        segment_BNC = _in_chunks(segment_BS - segment_BS[:, -1:], size) + segment_BS[:, -1:, None]
        before_BN1 = torch.cat((before_B1, segment_BNC[:, :-1, -1]), 1)[..., None]
        enters_BHNC = enters_BHNC * (segment_BNC == before_BN1)[:, None]
        hidden_CC = later_CC | (segment_BNC[..., :, None] != segment_BNC[..., None, :])[:, None]
    # [i, j]: the decays behind token j, up to i.
    between_BHNCC = decay_BHNC[..., None].expand(*decay_BHNC.shape, size).masked_fill(later_CC.mT.logical_not(), 0.0).cumsum(-2)
    pairs_BHNCC = between_BHNCC.masked_fill(hidden_CC, float("-inf")).exp()
    written_BHNCK = k_BHNCK * beta_BHNC[..., None]
    mixed_BHNCC = (written_BHNCK @ k_BHNCK.mT) * pairs_BHNCC
    right_BHNCX = torch.cat((v_BHNCV * beta_BHNC[..., None], written_BHNCK * enters_BHNC[..., None]), -1)
    solved_BHNCX = torch.linalg.solve_triangular(mixed_BHNCC, right_BHNCX, upper=False, unitriangular=True)
    u_BHNCV, w_BHNCK = solved_BHNCX.split((v_BHNCV.shape[-1], k_BHNCK.shape[-1]), -1)
    scores_BHNCC = (q_BHNCK @ k_BHNCK.mT) * pairs_BHNCC
    reads_BHNCK = q_BHNCK * enters_BHNC[..., None]
    leaves_BHNKC = (k_BHNCK * pairs_BHNCC[..., -1, :, None]).mT
    outputs = []
    for n in range(q_BHNCK.shape[2]):
        new_BHCV = u_BHNCV[:, :, n] - w_BHNCK[:, :, n] @ state_BHKV
        outputs.append(reads_BHNCK[:, :, n] @ state_BHKV + scores_BHNCC[:, :, n] @ new_BHCV)
        state_BHKV = enters_BHNC[:, :, n, -1, None, None] * state_BHKV + leaves_BHNKC[:, :, n] @ new_BHCV
    y_BSHV = torch.cat(outputs, 2)[:, :, :tokens].transpose(1, 2)
    return y_BSHV.to(v_BSHV.dtype).contiguous(), state_BHKV


def _in_chunks(x_BS: Tensor, size: int) -> Tensor:
    """[B, S, ...] to [B, N, C, ...], zeros behind the last token."""
    tokens = x_BS.shape[1]
    count = -(-tokens // size)
    return F.pad(x_BS, (*(0, 0) * (x_BS.ndim - 2), 0, count * size - tokens)).unflatten(1, (count, size))
