"""The entries of mixtures of experts, the kind `dispatcher`, and the event `moe` of a run. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

if TYPE_CHECKING:
    from intarsia.contracts import Run

INTARSIA_API = 1

_MOE = "intarsia_models_common.moe"


@hookimpl
def add_hookspecs() -> Sequence[str]:
    """The kind `dispatcher`."""
    return [f"{_MOE}.hookspecs"]


def _router(name: str, class_name: str, doc: str) -> Entry:
    return Entry(name=f"{name}_router", config=f"{_MOE}.config:{class_name}Config", target=f"{_MOE}.router:{class_name}", doc=doc)


@hookimpl
def offer_components() -> Sequence[Entry]:
    """The layer and its routers."""
    return [
        Entry(
            name="moe",
            config=f"{_MOE}.config:MoEConfig",
            target=f"{_MOE}.block:MoE",
            doc="A mixture of experts in a feed-forward layer's place.",
        ),
        Entry(
            name="gated_swiglu",
            config=f"{_MOE}.config:GatedSwiGLUConfig",
            target=f"{_MOE}.shared:GatedSwiGLU",
            doc="A gated feed-forward layer times the sigmoid of one more projection: a mixture's shared expert (Qwen).",
        ),
        _router("softmax", "SoftmaxRouter", "The experts of the largest logits, weighted by the softmax over all."),
        _router("sigmoid", "SigmoidRouter", "Each expert scored by a sigmoid of its own."),
        _router("group_limited", "GroupLimitedRouter", "Experts from the best few of several groups (DeepSeek-V2 and V3)."),
        _router("forced_balanced", "ForcedBalancedRouter", "For benchmarks: tokens go round the experts in turn."),
    ]


@hookimpl
def offer_dispatchers() -> Sequence[Entry]:
    """The dispatcher of one rank."""
    return [Entry(name="local", config=f"{_MOE}.config:LocalConfig", target=f"{_MOE}.dispatch:build", doc="Every expert is on this rank.")]


def _operator(name: str, doc: str) -> Entry:
    return Entry(name=name, target=f"{_MOE}.operators:{name.upper()}", doc=doc)


@hookimpl
def offer_operators() -> Sequence[Entry]:
    """What kernels may replace."""
    return [
        _operator("grouped_linear", "Rows in groups, a matrix for each group."),
        _operator("scaled_grouped_linear", "The same with matrices as float8 and one scale for each tile."),
        _operator("router_linear", "A router's logits, in float32 whatever the dtypes are."),
        _operator("router_sigmoid", "A router's scores of experts that do not compete."),
        _operator("grouped_swiglu", "Rows in groups through a gated layer's first two matrices of each group."),
        _operator("top_experts", "The experts of the largest scores, of the best groups if asked."),
        _operator("expert_weights", "The scores of a token's experts as weights, and their gradient."),
        _operator("expert_counts", "How busy experts are, for a step's report."),
        _operator("sort_pairs", "Pairs of tokens and experts in the order of experts."),
        _operator("permute", "Tokens to the rows of their experts."),
        _operator("combine", "Experts' rows back to their tokens, weighted and summed."),
    ]


@hookimpl
def offer_commands() -> Sequence[Entry]:
    """`intarsia moe report`."""
    return [Entry(name="moe", target=f"{_MOE}.report:MoECommand", doc="Show how busy the experts of a run were.")]


@hookimpl
def before_update(run: Run, step: int) -> None:
    """Record the event `moe` of steps that are logged: each layer's load."""
    if f"{_MOE}.router" in sys.modules:  # Else no model here has a router.
        from intarsia_models_common.moe.metrics import record_loads

        record_loads(run, step)
