"""The operators of vision towers that kernels may replace, each with its reference. Offered to `intarsia.ops`.

Suffixes: N rows (patches of several frames, one behind another), D channels or width of a head, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from intarsia.errors import PluginError
from intarsia.ops import Operator
from torch import Tensor


def layer_norm(x_ND: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """`weight * (x - mean(x)) / sqrt(var(x) + eps) + bias` over the last dimension, any leading ones (arXiv 1607.06450).

    All of it is in float32 (float64 for float64 input), and the result is cast to the input's dtype once.
    """
    return F.layer_norm(x_ND, x_ND.shape[-1:], weight_D, bias_D, eps)


def segment_attention(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, lengths: Sequence[int], *, scale: float) -> Tensor:
    """Softmax attention within segments: the first `lengths[0]` rows see one another and nothing else, the next `lengths[1]` likewise, and so on. [N, H, D] in the queries' dtype.

    `lengths` are whole numbers of the host that sum to N; 0 is an empty segment, and there may be none at all. There is no causal order within a segment. A row's result depends on
    its own segment only. Softmax is in float32 or better.
    """
    if sum(lengths) != q_NHD.shape[0]:
        raise PluginError(f"segment_attention: segments of {sum(lengths)} rows together were given {q_NHD.shape[0]} rows.")
    counts = [count for count in lengths if count]
    if not counts:
        # Of no rows the gradients are zeros, not absent.
        return v_NHD + (q_NHD + k_NHD).sum() * 0
    parts = zip(*(each.split(counts) for each in (q_NHD, k_NHD, v_NHD)), strict=True)
    return torch.cat([_attend(q_SHD, k_SHD, v_SHD, scale) for q_SHD, k_SHD, v_SHD in parts])


def _attend(q_SHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, scale: float) -> Tensor:
    q_BHSD, k_BHSD, v_BHSD = (each.transpose(0, 1)[None] for each in (q_SHD, k_SHD, v_SHD))
    return F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, scale=scale)[0].transpose(0, 1)


# A row of the first is by itself, and so is a segment of the second: what else is in the batch changes no shape of its products.
LAYER_NORM = Operator("layer_norm", layer_norm, "norm", invariant=True)
SEGMENT_ATTENTION = Operator("segment_attention", segment_attention, "other", invariant=True)
