"""The operators of mixtures of experts that kernels may replace, each with its reference (`products`, `rows`). Offered to `intarsia.ops`.

Suffixes: N tokens, K experts of a token, M rows in the order of experts, E experts, I input and O output features, D model width, o and i tiles of a float8 weight.
"""

from __future__ import annotations

from intarsia.ops import Operator

from intarsia_models_common.moe import choice, products, rows

GROUPED_LINEAR = Operator("grouped_linear", products.grouped_linear, "other", invariant=False)
# As invariant as what is in force for `grouped_linear`: the reference runs that.
SCALED_GROUPED_LINEAR = Operator("scaled_grouped_linear", products.scaled_grouped_linear, "other", invariant=True)
# What is in force for `grouped_linear` and `swiglu`, unless a kernel is both.
GROUPED_SWIGLU = Operator("grouped_swiglu", products.grouped_swiglu, "other", invariant=True)
ROUTER_LINEAR = Operator("router_linear", products.router_linear, "other", invariant=False)
# On a CPU an element's sigmoid depends on how many elements there are, in its last bit.
ROUTER_SIGMOID = Operator("router_sigmoid", products.router_sigmoid, "pointwise", invariant=False)
TOP_EXPERTS = Operator("top_experts", choice.top_experts, "other", invariant=True)
EXPERT_WEIGHTS = Operator("expert_weights", choice.expert_weights, "other", invariant=True)
EXPERT_COUNTS = Operator("expert_counts", choice.expert_counts, "other", invariant=True)
SORT_PAIRS = Operator("sort_pairs", rows.sort_pairs, "other", invariant=True)
PERMUTE = Operator("permute", rows.permute, "other", invariant=True)
COMBINE = Operator("combine", rows.combine, "other", invariant=True)
