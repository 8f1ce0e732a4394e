"""The operators of linear attention that kernels may replace, each with its reference. Offered to `intarsia.ops`."""

from __future__ import annotations

from intarsia.ops import Operator

from intarsia_models_common.linear_attention import delta_rule, short_conv

# Element by element, in a fixed order of taps.
SHORT_CONV = Operator("short_conv", short_conv.short_conv, "other", invariant=True)
GATED_DELTA_RULE = Operator("gated_delta_rule", delta_rule.gated_delta_rule, "other", invariant=False)
