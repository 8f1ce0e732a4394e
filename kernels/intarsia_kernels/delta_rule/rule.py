"""`gated_delta_rule` by chunks in Triton: one launch before the states, one along them; back along them, and one for all inputs' gradients. No atomics: equal calls give equal bits.

Kept for backward are T, P, the state before each chunk and what tokens write (n; both in the inputs' dtype); with `recompute` the latter two are computed again.

Shape suffixes: B rows, S tokens, H heads, K key dim, V value dim, N chunks of all rows, C tokens of a chunk.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from intarsia_models_common.linear_attention.delta_rule import NORM_EPS
from torch import Tensor

from intarsia_kernels.delta_rule.gradients import gradients_kernel
from intarsia_kernels.delta_rule.prepare import FACTORS, prepare_kernel
from intarsia_kernels.delta_rule.recurrence import backward_kernel, forward_kernel
from intarsia_kernels.delta_rule.schedule import BLOCK, RUN, schedule_kernel
from intarsia_kernels.delta_rule.settings import WIDTHS, Cut, multiprocessors, settings
from intarsia_kernels.direct import direct_op, wrap_triton

PRECISION = "tf32x3"
"""Float32 products by three of tensor cores."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    rows: int
    tokens: int
    heads: int
    keys: int
    values: int
    size: int

    @classmethod
    def of(cls, k_BSHK: Tensor, v_BSHV: Tensor) -> _Sizes:
        rows, tokens, heads, keys = k_BSHK.shape
        return cls(rows, tokens, heads, keys, v_BSHV.shape[-1], settings(k_BSHK.dtype, keys).chunk)

    @property
    def chunks(self) -> int:
        """Of a row."""
        return -(-self.tokens // self.size)

    @property
    def total(self) -> int:
        """Chunks of all rows."""
        return self.rows * self.chunks

    def programs(self, cut: Cut, device: torch.device, documents: bool) -> int:
        """As many as run at once, or as there can be runs."""
        runs = (2 * self.total if documents else self.rows) * self.heads * (self.values // cut.block)
        return min(runs, cut.resident * multiprocessors(device.index or 0))


@direct_op("intarsia::delta_rule_prepare")
def delta_rule_prepare(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    decay_BSH: Tensor,
    beta_BSH: Tensor,
    documents_BS: Tensor | None,
    counts_B: Tensor | None,
    scale: float,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """T and P [N, H, C, C], factors of rows [N, H, FACTORS, C], documents' ordinals [N, C], borders [N, 2], runs [2 N, RUN] and their count [1]; the last four are empty without documents."""
    sizes = _Sizes.of(k_BSHK, q_BSHK)
    known = documents_BS is not None
    total, size = sizes.total, sizes.size
    solved_NHCC = k_BSHK.new_empty(total, sizes.heads, size, size)
    scores_NHCC = torch.empty_like(solved_NHCC)
    factors_NHFC = k_BSHK.new_empty(total, sizes.heads, FACTORS.value, size, dtype=torch.float32)
    ordinals_NC, borders_N2, found, runs, count = (
        k_BSHK.new_empty(shape if known else (0,), dtype=torch.int32)
        for shape in ((total, size), (total, 2), (2 * total + 1,), (2 * total, RUN.value), (1,))
    )
    chosen = settings(k_BSHK.dtype, sizes.keys)
    cut = chosen.prepare
    wrap_triton(prepare_kernel)[(total, sizes.heads)](
        q_BSHK, k_BSHK, decay_BSH, beta_BSH, documents_BS, counts_B, solved_NHCC, scores_NHCC, factors_NHFC, ordinals_NC, borders_N2,
        sizes.tokens, sizes.chunks, sizes.heads, scale, NORM_EPS,
        K=sizes.keys, BLOCK_K=cut.block, C=size, NORMALISE=normalise, DOCUMENTS=known, COUNTS=counts_B is not None,
        EXACT=k_BSHK.dtype == torch.float32, PRECISION=chosen.inverse, num_stages=cut.stages, **cut.launch(),
    )  # fmt: skip
    if known:
        classes = total.bit_length()
        wrap_triton(schedule_kernel)[(1,)](borders_N2, found, runs, count, total, sizes.chunks, classes, C=size, BLOCK=BLOCK, num_warps=8)
    return solved_NHCC, scores_NHCC, factors_NHFC, ordinals_NC, borders_N2, runs, count


@direct_op("intarsia::delta_rule_forward")
def delta_rule_forward(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    state_BHKV: Tensor | None,
    counts_B: Tensor | None,
    solved_NHCC: Tensor,
    scores_NHCC: Tensor,
    factors_NHFC: Tensor,
    runs: Tensor,
    count: Tensor,
    output: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [B, S, H, V] and final states [B, H, K, V] (float32) where `output`, the states before each chunk [N, H, V, K] and n [N, H, V, C] where `keep`; empty else."""
    sizes = _Sizes.of(k_BSHK, v_BSHV)
    known = runs.numel() > 0
    y_BSHV = v_BSHV.new_empty(v_BSHV.shape if output else (0,))
    final_BHKV = v_BSHV.new_empty((sizes.rows, sizes.heads, sizes.keys, sizes.values) if output else (0,), dtype=torch.float32)
    states_NHVK = v_BSHV.new_empty((sizes.total, sizes.heads, sizes.values, sizes.keys) if keep else (0,))
    new_NHVC = v_BSHV.new_empty((sizes.total, sizes.heads, sizes.values, sizes.size) if keep else (0,))
    cut = settings(k_BSHK.dtype, sizes.keys).forward
    block = min(cut.block, sizes.values)
    wrap_triton(forward_kernel)[(sizes.programs(cut, k_BSHK.device, known),)](
        q_BSHK, k_BSHK, v_BSHV, solved_NHCC, scores_NHCC, factors_NHFC, runs, count, counts_B, state_BHKV, y_BSHV, states_NHVK,
        new_NHVC, final_BHKV, sizes.rows, sizes.tokens, sizes.chunks, sizes.heads,
        K=sizes.keys, V=sizes.values, C=sizes.size, BLOCK_V=block, DOCUMENTS=known, COUNTS=counts_B is not None,
        STATE=state_BHKV is not None, OUTPUT=output, KEEP=keep, STAGES=cut.stages, PRECISION=PRECISION, **cut.launch(),
    )  # fmt: skip
    return y_BSHV, final_BHKV, states_NHVK, new_NHVC


@direct_op("intarsia::delta_rule_backward")
def delta_rule_backward(
    dy_BSHV: Tensor,
    dfinal_BHKV: Tensor | None,
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    counts_B: Tensor | None,
    solved_NHCC: Tensor,
    scores_NHCC: Tensor,
    factors_NHFC: Tensor,
    borders_N2: Tensor,
    runs: Tensor,
    count: Tensor,
    state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x [N, H, V, C], of v, of the states behind each chunk [N, H, V, K], and of the state that enters [B, H, K, V] (float32, where `state`)."""
    sizes = _Sizes.of(k_BSHK, dy_BSHV)
    known = runs.numel() > 0
    dx_NHVC = dy_BSHV.new_empty(sizes.total, sizes.heads, sizes.values, sizes.size)
    dv_BSHV = torch.empty_like(dy_BSHV)
    dstates_NHVK = dy_BSHV.new_empty(sizes.total, sizes.heads, sizes.values, sizes.keys)
    dstate_BHKV = dy_BSHV.new_empty((sizes.rows, sizes.heads, sizes.keys, sizes.values) if state else (0,), dtype=torch.float32)
    cut = settings(k_BSHK.dtype, sizes.keys).backward
    block = min(cut.block, sizes.values)
    wrap_triton(backward_kernel)[(sizes.programs(cut, k_BSHK.device, known),)](
        dy_BSHV, dfinal_BHKV, q_BSHK, k_BSHK, solved_NHCC, scores_NHCC, factors_NHFC, borders_N2, runs, count, counts_B, dx_NHVC,
        dv_BSHV, dstates_NHVK, dstate_BHKV, sizes.rows, sizes.tokens, sizes.chunks, sizes.heads,
        K=sizes.keys, V=sizes.values, C=sizes.size, BLOCK_V=block, DOCUMENTS=known, COUNTS=counts_B is not None, STATE=state,
        FINAL=dfinal_BHKV is not None, STAGES=cut.stages, PRECISION=PRECISION, **cut.launch(),
    )  # fmt: skip
    return dx_NHVC, dv_BSHV, dstates_NHVK, dstate_BHKV


@direct_op("intarsia::delta_rule_gradients")
def delta_rule_gradients(
    dy_BSHV: Tensor,
    dx_NHVC: Tensor,
    new_NHVC: Tensor,
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    counts_B: Tensor | None,
    factors_NHFC: Tensor,
    ordinals_NC: Tensor,
    states_NHVK: Tensor,
    dstates_NHVK: Tensor,
    scale: float,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, and in float32 of decay and beta."""
    sizes = _Sizes.of(k_BSHK, v_BSHV)
    dq_BSHK, dk_BSHK = torch.empty_like(q_BSHK), torch.empty_like(k_BSHK)
    ddecay_BSH = decay_BSH.new_empty(decay_BSH.shape, dtype=torch.float32)
    dbeta_BSH = torch.empty_like(ddecay_BSH)
    cut = settings(k_BSHK.dtype, sizes.keys).gradients
    wrap_triton(gradients_kernel)[(sizes.total, sizes.heads)](
        dy_BSHV, dx_NHVC, new_NHVC, q_BSHK, k_BSHK, v_BSHV, decay_BSH, factors_NHFC, ordinals_NC, counts_B, states_NHVK,
        dstates_NHVK, dq_BSHK, dk_BSHK, ddecay_BSH, dbeta_BSH, sizes.tokens, sizes.chunks, sizes.heads, scale,
        K=sizes.keys, V=sizes.values, C=sizes.size, BLOCK_V=min(cut.block, sizes.values), NORMALISE=normalise,
        DOCUMENTS=ordinals_NC.numel() > 0, COUNTS=counts_B is not None, EXACT=k_BSHK.dtype == torch.float32, STAGES=cut.stages,
        PRECISION=PRECISION, **cut.launch(),
    )  # fmt: skip
    return dq_BSHK, dk_BSHK, ddecay_BSH, dbeta_BSH


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSHK: Tensor,
        k_BSHK: Tensor,
        v_BSHV: Tensor,
        decay_BSH: Tensor,
        beta_BSH: Tensor,
        state_BHKV: Tensor | None,
        documents_BS: Tensor | None,
        counts_B: Tensor | None,
        scale: float,
        normalise: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH = (x.contiguous() for x in (q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH))
        state, documents_BS, counts_B = (None if x is None else x.contiguous() for x in (state_BHKV, documents_BS, counts_B))
        state = None if state is None else state.float()
        found = delta_rule_prepare(q_BSHK, k_BSHK, decay_BSH, beta_BSH, documents_BS, counts_B, scale, normalise)
        solved, scores, factors, ordinals, borders, runs, count = found
        kept = (solved, scores, factors, runs, count)
        y_BSHV, final_BHKV, states, new = delta_rule_forward(q_BSHK, k_BSHK, v_BSHV, state, counts_B, *kept, True, keep)
        again = (states, new) if keep else (None, None)
        ctx.save_for_backward(q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH, state, counts_B, ordinals, borders, *again, *kept)
        ctx.scale, ctx.normalise, ctx.state_dtype = scale, normalise, None if state_BHKV is None else state_BHKV.dtype
        return y_BSHV, final_BHKV

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH, state, counts_B, ordinals, borders, states, new, *kept = ctx.saved_tensors
        solved, scores, factors, runs, count = kept
        if states is None:
            _, _, states, new = delta_rule_forward(q_BSHK, k_BSHK, v_BSHV, state, counts_B, *kept, False, True)
        dy_BSHV = torch.zeros_like(v_BSHV) if grads[0] is None else grads[0].to(v_BSHV.dtype).contiguous()
        dfinal_BHKV = None if grads[1] is None else grads[1].float().contiguous()
        needs_state = ctx.needs_input_grad[5]
        dx, dv, dstates, dstate_BHKV = delta_rule_backward(
            dy_BSHV, dfinal_BHKV, q_BSHK, k_BSHK, counts_B, solved, scores, factors, borders, runs, count, needs_state
        )  # fmt: skip
        dq, dk, ddecay, dbeta = delta_rule_gradients(
            dy_BSHV, dx, new, q_BSHK, k_BSHK, v_BSHV, decay_BSH, counts_B, factors, ordinals, states, dstates, ctx.scale, ctx.normalise
        )  # fmt: skip
        dstate = dstate_BHKV.to(ctx.state_dtype) if needs_state else None
        return dq, dk, dv, ddecay.to(decay_BSH.dtype), dbeta.to(beta_BSH.dtype), dstate, *(None,) * 5


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
    form: Literal["chunked", "recurrent"] = "chunked",
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """As the operator `gated_delta_rule`. The size of chunks is the kernel's own (`settings`): `chunk` says how the reference cuts."""
    inputs = (q_BSHK, k_BSHK, v_BSHV, decay_BSH, beta_BSH, state_BHKV)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return _GatedDeltaRule.apply(*inputs, documents_BS, counts_B, float(scale), normalise, wanted and not recompute)


def supports(
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
    form: str = "chunked",
    recompute: bool = False,
) -> str | None:
    """Why a call cannot be taken."""
    if form != "chunked":
        return "it computes by chunks, not token by token"
    if q_BSHK.dtype not in DTYPES or not q_BSHK.dtype == k_BSHK.dtype == v_BSHV.dtype:
        return f"queries, keys and values in {q_BSHK.dtype}, {k_BSHK.dtype}, {v_BSHV.dtype}; it takes one of bfloat16, float16 and float32 for all three"
    if (
        decay_BSH.dtype == torch.float64
        or beta_BSH.dtype == torch.float64
        or (state_BHKV is not None and state_BHKV.dtype == torch.float64)
    ):
        return "it computes in float32"
    for what, width in (("keys", k_BSHK.shape[-1]), ("values", v_BSHV.shape[-1])):
        if width not in WIDTHS:
            return f"{what} of width {width}; it takes {', '.join(map(str, WIDTHS))}"
    if not q_BSHK.numel():
        return "no tokens"
    return None


gated_delta_rule.supports = supports  # type: ignore[attr-defined]
