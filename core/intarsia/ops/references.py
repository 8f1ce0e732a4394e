"""The pointwise, norm and lookup references. Shape suffixes as in `intarsia.ops`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias` over the last dimension, any leading ones; I input and O output features."""
    return F.linear(x_NI, weight_OI, bias_O)


def rms_norm(x_ND: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """`weight * cast(x32 / sqrt(mean(x32^2) + eps))` over the last dimension, any leading ones.

    Statistics and normalisation are in float32 (float64 for float64 input); the cast back to the input's dtype comes before the weight, as
    Llama's reference has it. `weight_D` None: no weight.
    """
    size = x_ND.shape[-1:]
    if x_ND.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x_ND, size, weight_D, eps)
    y_ND = F.rms_norm(x_ND.float(), size, None, eps).to(x_ND.dtype)
    return y_ND if weight_D is None else y_ND * weight_D


def rope(x_BSHD: Tensor, cos_BSd: Tensor, sin_BSd: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate d pairs of each head by the angles whose cosine and sine are given (RoFormer, arXiv 2104.09864).

    Pair i is (i, i + d) in the half-split layout and (2i, 2i + 1) in the interleaved one, which multiplies the complex number
    x[2i] + j x[2i+1] by cos + j sin. Dimensions from 2d on pass unchanged. The products are in the tables' dtype (float32); the
    result has the input's.
    """
    d = cos_BSd.shape[-1]
    x, rest = (x_BSHD, None) if x_BSHD.shape[-1] == 2 * d else x_BSHD.split((2 * d, x_BSHD.shape[-1] - 2 * d), -1)
    cos, sin = cos_BSd.unsqueeze(-2), sin_BSd.unsqueeze(-2)
    first, second = x.unflatten(-1, (d, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    first, second = first.to(cos.dtype), second.to(cos.dtype)
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return y.to(x.dtype) if rest is None else torch.cat((y.to(x.dtype), rest), -1)


def swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """`silu(gate) * up` (arXiv 2002.05202)."""
    return F.silu(gate_NF) * up_NF


def embedding(ids_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows `ids_BS` (int64) of `weight_VD`: [B, S, D]."""
    return F.embedding(ids_BS, weight_VD)
