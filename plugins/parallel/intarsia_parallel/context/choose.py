"""What `parallel.context=auto` does: a rule about bytes and FLOPs; and which cut of the sequence a model takes.

For one call on the slowest rank, forward, in seconds on a notional device (`RATE` FLOP/s, `BANDWIDTH` bytes/s received, `LATENCY` s for each exchange):

    compute    (4 by the head dims' mean) x pairs of query and key x query heads / RATE, the same for all three
    gather     bytes of keys and values seen elsewhere / BANDWIDTH + LATENCY, then compute
    ring       for each step max(compute of its block, bytes of the next / BANDWIDTH + LATENCY), and a block's start for each step
    ulysses    bytes of queries, keys, values and outputs that change their rank / BANDWIDTH + 2 LATENCY, then compute

The smallest wins. Sliding windows make `gather` move a halo; few key/value heads make it cheaper than `ulysses`; long rows hide the ring's transfers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from intarsia.contracts import Mixer
from intarsia.errors import UsageError, did_you_mean

from intarsia_parallel.context import ulysses
from intarsia_parallel.context.cut import Ranges, SequenceCut, length
from intarsia_parallel.context.plan import Plan

if TYPE_CHECKING:
    from torch import nn

METHODS = ("auto", "ring", "gather", "ulysses")
RATE = 4e14
"""FLOP/s of attention."""
BANDWIDTH = 2e11
"""Bytes/s that a rank receives."""
LATENCY = 2e-5
"""Seconds of an exchange of nothing, and of what a further block costs to start."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One softmax call: rows, heads on this device, head dims of keys and values, bytes of an element."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    element_size: int = 2


@dataclasses.dataclass(frozen=True)
class Choice:
    """A method and why."""

    method: str
    reason: str


def check(method: str) -> None:
    """Raise UsageError for a method that does not exist."""
    if method not in METHODS:
        raise UsageError(f"parallel.context {method!r} is no way of context parallelism. {did_you_mean(method, METHODS)}")


def choose(shape: Shape, plan: Plan) -> Choice:
    """The cheapest method by the rule above."""
    seconds = {"ring": _ring(shape, plan), "gather": _gather(shape, plan)}
    refused = ulysses.obstacle(shape.heads, plan.cut.ranks)
    if refused is None:
        seconds["ulysses"] = _ulysses(shape, plan)
    best = min(seconds, key=lambda method: seconds[method])
    estimates = ", ".join(f"{method} {1e6 * value:.0f} us" for method, value in sorted(seconds.items(), key=lambda item: item[1]))
    window = "no window" if plan.window is None else f"window {plan.window}"
    what = f"{plan.cut.tokens} tokens, cp {plan.cut.ranks}, {shape.heads} heads, {shape.kv_heads} key/value heads, {window}"
    return Choice(
        best, f"auto: estimates for a call's forward ({what}): {estimates}" + ("" if refused is None else f"; not ulysses: {refused}")
    )


def cut_for(model: nn.Module) -> tuple[str, str]:
    """(cut, reason): one cut of a batch serves all mixers of a model."""
    kinds: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, Mixer):
            kinds.setdefault(module.cache_spec().kind, name)
    if "recurrent" in kinds:
        return "contiguous", f"mixer {kinds['recurrent']!r} passes a state along the row"
    return "zigzag", "attention alone: all ranks get the same work under a causal mask"


def _compute(shape: Shape, pairs: float) -> float:
    return 2.0 * (shape.head_dim + shape.value_dim) * shape.heads * shape.rows * pairs / RATE


def _bytes(shape: Shape, tokens: int) -> float:
    return float(tokens * shape.rows * shape.kv_heads * (shape.head_dim + shape.value_dim) * shape.element_size)


def _pairs(plan: Plan, rank: int, keys: Ranges) -> float:
    """Pairs of query and key that are computed, on average over the rows."""
    total = 0.0
    for segment in plan.segments(rank, keys):
        pairs = segment.queries * segment.keys
        # Half of the square at the diagonal is not seen.
        total += pairs - segment.queries * min(segment.queries, segment.keys) / 2 if segment.lead == 0 and segment.queries > 1 else pairs
    return total / max(1, len(plan.documents.starts))


def _ring(shape: Shape, plan: Plan) -> float:
    """Ranks go in step, since each waits for another's block: the slowest in each step counts."""
    ranks = range(plan.cut.ranks)
    computing = [max(_compute(shape, _pairs(plan, r, plan.cut.ranges[r])) for r in ranks)]
    moving = []
    for shift in plan.shifts:
        arriving = [plan.transfers[(r - shift) % plan.cut.ranks][r] for r in ranks]
        computing.append(max(_compute(shape, _pairs(plan, r, keys)) for r, keys in zip(ranks, arriving, strict=True)))
        moving.append(LATENCY + max(_bytes(shape, length(keys)) for keys in arriving) / BANDWIDTH)
    return sum(max(work, move) + LATENCY for work, move in zip(computing, [*moving, 0.0], strict=True))


def _gather(shape: Shape, plan: Plan) -> float:
    ranks = range(plan.cut.ranks)
    seen = [length(plan.needs[r]) - plan.cut.counts[r] for r in ranks]
    work = max(_compute(shape, _pairs(plan, r, plan.needs[r])) for r in ranks)
    return (LATENCY if any(seen) else 0.0) + max(_bytes(shape, tokens) for tokens in seen) / BANDWIDTH + LATENCY + work


def _ulysses(shape: Shape, plan: Plan) -> float:
    ranks, tokens = plan.cut.ranks, plan.cut.tokens
    whole = SequenceCut(tokens, (((0, tokens),),)) if tokens else plan.cut
    own, away = shape.heads // ranks, tokens - min(plan.cut.counts)
    read = max(len(ulysses.read_by(r, shape.heads, shape.kv_heads, ranks)) for r in range(ranks))
    there = away * (own * shape.head_dim + read * (shape.head_dim + shape.value_dim))
    # The outputs of all heads but the own come back for the own tokens.
    back = max(plan.cut.counts) * (shape.heads - own) * shape.value_dim
    pairs = _pairs(dataclasses.replace(plan, cut=whole), 0, whole.ranges[0])
    return (there + back) * shape.rows * shape.element_size / BANDWIDTH + 3 * LATENCY + _compute(shape, pairs) / ranks
