"""The operators that kernels may replace, each with a plain reference.

    linear  rms_norm  rope  swiglu  embedding  attention  cross_entropy

Plugins own further ones (`offer_operators`). Model code calls `ops.NAME(...)`, or the plugin's operator. Which implementation runs is chosen once for a run by `select` and put in force by `install`;
without that every operator is its reference.

Shape suffixes: B rows, S query tokens, T key tokens, H query heads, K key/value heads, D head or model dim, V vocabulary,
N tokens of any arrangement, I input and O output features, d rotated pairs of a head.
"""

from __future__ import annotations

from intarsia.ops.attention_reference import Packing
from intarsia.ops.operator import (
    Choice,
    Operator,
    attention,
    cross_entropy,
    embedding,
    installed,
    linear,
    operators,
    rms_norm,
    rope,
    swiglu,
)
from intarsia.ops.select import Selection, install, select

__all__ = [
    "Choice",
    "Operator",
    "Packing",
    "Selection",
    "attention",
    "cross_entropy",
    "embedding",
    "install",
    "installed",
    "linear",
    "operators",
    "rms_norm",
    "rope",
    "select",
    "swiglu",
]
