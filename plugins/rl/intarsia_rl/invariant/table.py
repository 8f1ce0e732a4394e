"""The table of the batch-invariant mode: which kernel serves each operator on a kind of device, and why its rows do not depend on the batch. Torch-free.

What is not in the table is not in the mode: `intarsia_rl.invariant.check` refuses it by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

Device = Literal["cpu", "cuda"]

REFERENCE = "reference"
_KERNELS = "intarsia-kernels"
_ANY = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel that may serve an operator. Stability: provisional.

    `kernel` is `reference` or an entry's full name. Of several for one operator the first that fits the others is what `batch_invariant` chooses. `environment` are variables that must have these values
    in every process of the run before it starts. `beside`: of another operator, the kernels of which one must be in force, as this one has their bits and no others.
    """

    op: str
    device: Device
    kernel: str
    why: str
    dtypes: tuple[str, ...] = _ANY
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    beside: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def unfit(self, kernels: Mapping[str, str]) -> str | None:
        """The operator whose kernel among these this one does not go with; None where there is none."""
        return next((op for op, names in self.beside.items() if kernels.get(op, names[0]) not in names), None)


def _cpu(op: str, why: str, kernel: str = "tiled") -> Row:
    return Row(op, "cpu", REFERENCE if kernel == REFERENCE else f"{_KERNELS}:{op}/{kernel}", why)


def _cuda(op: str, why: str, kernel: str = REFERENCE, **environment: str) -> Row:
    return Row(op, "cuda", REFERENCE if kernel == REFERENCE else f"{_KERNELS}:{kernel}", why, ("bfloat16",), environment)


_ROW_BY_ROW = "Each row or element by itself, by exact roundings and functions that do not depend on where it lies."
_BY_SEGMENT = "Each segment in a call of its own, whose shapes are the segment's."
_BY_LINEAR = "By what is in force for linear."
_BY_ATTENTION = "By what is in force for attention, over the entries as they lie in order."
_REFUSED = "intarsia-rl:gated_delta_rule/refused"
_NONE = "Refused: its sums depend on where in a chunk a token lies. No component of this table calls it."

ROWS = (
    _cpu("linear", "A row's bits are those of a 16-row tile; one product over many tiles only where it was seen to give them."),
    _cpu("attention", "Tiles of 16 queries and 32 keys at absolute positions; blocks that are not seen change nothing."),
    _cpu("swiglu", "By the exponential: torch's own float32 sigmoid differs between a vector's worth of elements and what is left."),
    _cpu("cross_entropy", "Logits as by linear, log_softmax row by row. The sum over tokens is of the batch, each token's part is not."),
    _cpu("grouped_linear", "Each group by itself, a row's bits those of a 16-row tile."),
    _cpu("router_linear", "Float32, a row's bits those of a 16-row tile."),
    _cpu("router_sigmoid", "By the exponential, as swiglu."),
    _cpu("sigmoid_gate", "By the exponential, as swiglu."),
    _cpu("rms_norm", "torch sums each row by itself and in one order (rows of fewer than 32768 columns).", REFERENCE),
    _cpu("offset_rms_norm", "As rms_norm.", REFERENCE),
    _cpu("layer_norm", "As rms_norm.", REFERENCE),
    _cpu("segment_attention", _BY_SEGMENT, REFERENCE),
    _cpu("rope", _ROW_BY_ROW, REFERENCE),
    _cpu("embedding", "A copy.", REFERENCE),
    _cpu("top_experts", "Scores of a token are compared with one another.", REFERENCE),
    _cpu("expert_weights", "A token's scores are summed in the order of its choices.", REFERENCE),
    _cpu("expert_counts", "Counts for reports, which nothing is computed from.", REFERENCE),
    _cpu("sort_pairs", "Whole numbers.", REFERENCE),
    _cpu("grouped_swiglu", "By what is in force for grouped_linear and swiglu.", REFERENCE),
    _cpu("permute", "A copy.", REFERENCE),
    _cpu("combine", "A token's rows are summed in the order of its choices.", REFERENCE),
    _cpu("paged_attention", _BY_ATTENTION, REFERENCE),
    _cpu("scaled_linear", _BY_LINEAR, REFERENCE),
    _cpu("scaled_grouped_linear", "By what is in force for grouped_linear.", REFERENCE),
    _cpu("short_conv", "Element by element, the taps in their order; silu by the exponential.", REFERENCE),
    Row("gated_delta_rule", "cpu", _REFUSED, _NONE),
    _cpu("token_log_probs", f"{_BY_LINEAR} log_softmax row by row.", REFERENCE),
    _cuda(
        "linear",
        "cuBLAS without a workspace cannot split a sum over blocks: one ascending sum in float32 for each element.",
        "linear/unsplit",
        CUBLAS_WORKSPACE_CONFIG=":0:0",
    ),
    _cuda(
        "linear", "Tiles of fixed order: one ascending sum in float32 for each element, whatever the number of rows.", "linear/ascending"
    ),
    _cuda(
        "attention",
        "One kernel for training and decoding: blocks of 64 keys at absolute positions, none shared by programs.",
        "attention/blocks",
    ),
    _cuda(
        "attention", "As attention/blocks, whose bits it has; gradients by flash attention in one order of sums.", "attention/blocks_flash"
    ),
    _cuda("attention", "Flash attention over packed keys, never split and never packed by groups.", "attention/unsplit"),
    Row(
        "paged_attention",
        "cuda",
        f"{_KERNELS}:paged_attention/blocks",
        "The tiles of attention/blocks and its bits, read through tables.",
        ("bfloat16",),
        beside={"attention": (f"{_KERNELS}:attention/blocks", f"{_KERNELS}:attention/blocks_flash")},
    ),
    _cuda("paged_attention", _BY_ATTENTION),
    _cuda("swiglu", _ROW_BY_ROW, "swiglu/triton"),
    _cuda("swiglu", _ROW_BY_ROW),
    _cuda("cross_entropy", f"{_BY_LINEAR} log_softmax row by row.", "cross_entropy/by_linear"),
    _cuda("grouped_linear", "Each group in tiles that sum in ascending order.", "grouped_linear/grouped_mm"),
    _cuda(
        "router_linear", "Float32 tiles of fixed order; cuBLAS's float32 product depends on the rows up to 16.", "router_linear/ascending"
    ),
    _cuda("router_sigmoid", _ROW_BY_ROW, "router_sigmoid/tiled"),
    _cuda("rms_norm", "A program for each row.", "triton"),
    _cuda("rms_norm", "torch's fused norm: a program for each row."),
    _cuda("offset_rms_norm", "As rms_norm."),
    _cuda("layer_norm", "torch's norm: a block of threads for each row."),
    _cuda("segment_attention", _BY_SEGMENT),
    _cuda("sigmoid_gate", _ROW_BY_ROW, "sigmoid_gate/tiled"),
    _cuda("rope", _ROW_BY_ROW, "rope/fused"),
    _cuda("rope", _ROW_BY_ROW),
    _cuda("embedding", "A copy."),
    _cuda("top_experts", "Scores of a token are compared with one another."),
    _cuda("expert_weights", "A token's scores are summed in the order of its choices."),
    _cuda("expert_counts", "Counts for reports, which nothing is computed from."),
    _cuda("sort_pairs", "Whole numbers."),
    _cuda("grouped_swiglu", "By what is in force for grouped_linear and swiglu."),
    _cuda("permute", "A copy."),
    _cuda("combine", "A token's rows are summed in the order of its choices."),
    _cuda("scaled_linear", _BY_LINEAR),
    _cuda("scaled_grouped_linear", "By what is in force for grouped_linear."),
    _cuda("short_conv", _ROW_BY_ROW),
    Row("gated_delta_rule", "cuda", _REFUSED, _NONE, ("bfloat16",)),
    _cuda("token_log_probs", f"{_BY_LINEAR} log_softmax row by row."),
)

COMPONENTS: Mapping[str, str] = {
    "intarsia-models-common:block": "Sums and its parts.",
    "intarsia-models-common:attention": "softmax attention over packed rows and paged caches.",
    "intarsia-models-common:mla": "Latent attention, in its plain form on both sides.",
    "intarsia-models-common:swiglu": "Linear layers and swiglu.",
    "intarsia-models-common:rms_norm": "The operator rms_norm.",
    "intarsia-models-common:offset_rms_norm": "The operator offset_rms_norm.",
    "intarsia-models-common:rope": "Sines and cosines of positions, element by element.",
    "intarsia-models-common:moe": "Routed experts, each row by itself.",
    "intarsia-models-common:softmax_router": "softmax row by row.",
    "intarsia-models-common:sigmoid_router": "The operator router_sigmoid.",
    "intarsia-models-common:group_limited_router": "softmax, or the operator router_sigmoid.",
}
"""Components of models that call nothing but operators and what is row by row in torch."""

MODELS = ("intarsia-llama3:llama3", "intarsia-deepseek-v3:deepseek_v3", "intarsia-qwen3:qwen3")
REFUSED: Mapping[str, str] = {
    "intarsia-models-common:gated_delta_net": "It is a recurrence (operator gated_delta_rule): a trainer sums over chunks that begin with a sequence, a generator goes on token by token and in chunks that begin anywhere, and the "
    "sigmoids of its gates are in no operator.",
    "intarsia-models-common:vision_tower": "Nobody has shown that features of an image do not depend on the images beside it.",
    "generator.dtype or generator.device other than the trainer's": "The two sides would round otherwise.",
    "generator.tensor above 1": "Each rank multiplies a part of a row, and the partial products are added up afterwards: another order of sums than the trainer's, which has the whole row.",
    "mesh.tp, mesh.cp, mesh.ep or mesh.pp above 1": "Ranks of the trainer would sum what a generator sums alone.",
    "compile.mode other than none": "Compiled code rounds otherwise than the generator's.",
    "data.loader.audit=0 with max_lag above 0": "A step whose tokens are all of older weights would show no gap.",
    "jitter of a router": "The trainer's routers would see noise, and the generator's would not.",
    "dispatchers that drop tokens": "What is dropped depends on the batch.",
    "weights gathered as float8": "The generator holds them unrounded.",
}
"""What the mode refuses by name, components first, and why."""

OF_CORE = ("attention", "cross_entropy", "embedding", "linear", "rms_norm", "rope", "swiglu")
"""Operators that are there whatever is installed."""

DISPATCHERS = ("intarsia-models-common:local",)
MESH = ("dp_replicate", "dp_shard")
"""Axes of the mesh that may be larger than 1: the others sum over ranks what a generator sums alone."""


def rows_of(op: str, device: str) -> tuple[Row, ...]:
    """The kernels that may serve an operator there, the chosen one first."""
    return tuple(row for row in ROWS if row.op == op and row.device == device)


def operators(device: str) -> tuple[str, ...]:
    """The operators of the table there."""
    return tuple(dict.fromkeys(row.op for row in ROWS if row.device == device))


def kernels(device: str) -> dict[str, str]:
    """`Recipe.kernels` of the mode: every operator and the kernel that serves it."""
    return {op: rows_of(op, device)[0].kernel for op in operators(device)}


def dtypes(device: str) -> tuple[str, ...]:
    """What a run may compute in there."""
    return tuple(dict.fromkeys(dtype for row in ROWS if row.device == device for dtype in row.dtypes))
