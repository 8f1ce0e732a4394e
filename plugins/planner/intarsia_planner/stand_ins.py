"""What stands in for a device's kernels where the device is not there: the same shapes, and the same tensors kept for backward. Shape suffixes as in `intarsia.ops`.

| operator | kept for backward | source |
|---|---|---|
| attention | q, k, v, the output, log-sum-exps (float32) | flash attention, arXiv 2205.14135; `kernels/intarsia_kernels/attention` calls nothing else |
| cross_entropy | the gradients by hidden states and, in float32, by the weight; one chunk's logits while it runs | `kernels/intarsia_kernels/loss/triton_cross_entropy.py` |
| rms_norm | x, the weight, the reciprocal root for each row (float32) | `kernels/intarsia_kernels/norm/triton_rms_norm.py` |
| segment_attention | as attention | torch's own attention, segment by segment (the operator's reference) |
| gated_delta_rule | the inputs, and of each chunk its state, two triangles and nine factors (`delta_rule`) | `kernels/intarsia_kernels/delta_rule/rule.py` |

Other operators' kernels keep what their references do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from intarsia import ops
from intarsia.contracts import KernelEntry
from intarsia.ops.operator import Choice
from intarsia.plugins import Plugins
from torch import Tensor

from intarsia_planner.delta_rule import gated_delta_rule


@torch.library.custom_op("intarsia_planner::attention", mutates_args=())
def attention_forward(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exps; `share` is how much of the square of queries and keys is computed."""
    return _attention_shapes(q_BSHD, v_BTKD)


@attention_forward.register_fake
def _(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, share: float) -> tuple[Tensor, Tensor]:
    return _attention_shapes(q_BSHD, v_BTKD)


def _attention_shapes(q_BSHD: Tensor, v_BTKD: Tensor) -> tuple[Tensor, Tensor]:
    return q_BSHD.new_empty(*q_BSHD.shape[:3], v_BTKD.shape[-1]), q_BSHD.new_empty(q_BSHD.shape[:3], dtype=torch.float32)


@torch.library.custom_op("intarsia_planner::attention_backward", mutates_args=())
def attention_backward(
    grad_BSHD: Tensor, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, out_BSHD: Tensor, lse_BSH: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    return torch.empty_like(q_BSHD), torch.empty_like(k_BTKD), torch.empty_like(v_BTKD)


@attention_backward.register_fake
def _(
    grad_BSHD: Tensor, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, out_BSHD: Tensor, lse_BSH: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_BSHD), torch.empty_like(k_BTKD), torch.empty_like(v_BTKD)


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.share = inputs[3]
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.set_materialize_grads(False)


def _attention_gradients(ctx: Any, grad_BSHD: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return (*attention_backward(grad_BSHD, *ctx.saved_tensors, ctx.share), None)


attention_forward.register_autograd(_attention_gradients, setup_context=_keep_attention)


def attention(
    q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, *, scale: float, window: int | None = None, packing: Any = None, **_: Any
) -> Tensor:
    """As `intarsia.ops.attention`."""
    queries, keys = q_BSHD.shape[1], k_BTKD.shape[1]
    seen = min(window or keys, keys)
    # Causal, over the last `queries` of the keys.
    share = (seen / keys) * (1 - seen / (2 * keys)) if queries == keys else 1.0 - queries / (2 * keys)
    return attention_forward(q_BSHD, k_BTKD, v_BTKD, share)[0]


@torch.library.custom_op("intarsia_planner::cross_entropy", mutates_args=())
def cross_entropy_forward(
    hidden_ND: Tensor, weight_VD: Tensor, chunk: int, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, and the gradients by hidden states and weight ([0] where not needed)."""
    return _cross_entropy_shapes(hidden_ND, weight_VD, needs_hidden, needs_weight)


@cross_entropy_forward.register_fake
def _(hidden_ND: Tensor, weight_VD: Tensor, chunk: int, needs_hidden: bool, needs_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _cross_entropy_shapes(hidden_ND, weight_VD, needs_hidden, needs_weight)


def _cross_entropy_shapes(hidden_ND: Tensor, weight_VD: Tensor, needs_hidden: bool, needs_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.empty_like(hidden_ND) if needs_hidden else hidden_ND.new_empty(0)
    weight = torch.empty_like(weight_VD, dtype=torch.float32) if needs_weight else hidden_ND.new_empty(0)
    return hidden_ND.new_empty((), dtype=torch.float32), hidden, weight


def _keep_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtype, ctx.needs = inputs[1].dtype, inputs[3:]
    ctx.set_materialize_grads(False)


def _cross_entropy_gradients(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    hidden, weight = ctx.saved_tensors
    return (
        torch.mul(hidden, scale, out=torch.empty_like(hidden)) if ctx.needs[0] else None,
        torch.mul(weight, scale, out=torch.empty_like(weight, dtype=ctx.dtype)) if ctx.needs[1] else None,
        *(None,) * 3,
    )


cross_entropy_forward.register_autograd(_cross_entropy_gradients, setup_context=_keep_cross_entropy)


def cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, softcap: float | None = None, chunk: int = 1024) -> Tensor:
    """As `intarsia.ops.cross_entropy`. A chunk's logits are there for a while."""
    needs = torch.is_grad_enabled()
    # Made and dropped, so that whoever watches memory sees them.
    hidden_ND.new_empty(min(chunk, hidden_ND.shape[0]), weight_VD.shape[0])
    return cross_entropy_forward(hidden_ND, weight_VD, chunk, needs and hidden_ND.requires_grad, needs and weight_VD.requires_grad)[0]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


def rms_norm(x: Tensor, weight: Tensor, eps: float, *further: Any, **settings: Any) -> Tensor:
    """As `intarsia.ops.rms_norm`."""
    return _Norm.apply(x, weight, eps)


def segment_attention(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, lengths: Sequence[int], *, scale: float) -> Tensor:
    """As the operator: rows see their own segment."""
    rows = max(1, q_NHD.shape[0])
    share = sum(length**2 for length in lengths) / rows**2
    return attention_forward(q_NHD[None], k_NHD[None], v_NHD[None], share)[0][0]


STAND_INS = {"attention": attention, "cross_entropy": cross_entropy, "rms_norm": rms_norm, "gated_delta_rule": gated_delta_rule}


class _Elsewhere:
    """Plugins of which no kernel is imported: the device that has them is not here."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plugins, name)

    def target(self, entry: Any) -> Any:
        """A stand-in for a kernel, the reference where there is none; what anything else is."""
        return STAND_INS.get(entry.op) if isinstance(entry, KernelEntry) else self._plugins.target(entry)


def choices(recipe: Any, plugins: Plugins, capabilities: Collection[str]) -> dict[str, Choice]:
    """What `ops.select` would choose on a device of these capabilities, with stand-ins for the kernels' code."""
    elsewhere: Any = _Elsewhere(plugins)
    found = ops.select(
        recipe.kernels, elsewhere, capabilities, recipe.precision.compute, compiled=recipe.compile.mode != "none", measured={}
    )
    # Its reference calls what a device has, and that is not what the meta device has.
    return {**found.choices, "segment_attention": Choice("reference", "a stand-in", segment_attention)}
