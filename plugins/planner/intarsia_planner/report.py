"""A plan in words and as JSON. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from intarsia_flexshard import report as buckets
from intarsia_flexshard.report import count_text, size_text

if TYPE_CHECKING:
    from intarsia_planner.plan import RunPlan, StagePlan

HELD = (
    ("parameters", "parameters: masters, their copies, whole ones"),
    ("optimizer", "optimizer state"),
    ("accumulated", "gradients of earlier micro-batches, whole"),
    ("buffers", "gradients on their way"),
    ("activations", "activations that wait for backward"),
    ("transient", "the most that a pass has beside them"),
    ("peak", "most at once"),
    ("gradients", "gradients of the masters, at the step's end"),
    ("host", "in the host's memory"),
)
SPENT = (
    ("compute", "computation"),
    ("exposed", "communication that computation waits for"),
    ("shared", "computation slowed down by communication"),
    ("bubble", "waiting for other stages"),
    ("update", "optimizer, casts, norms, sums of gradients"),
    ("border", "waiting for the host"),
)


def lines(plan: RunPlan, unfolded: bool = False) -> list[str]:
    """The plan as tables: of the run, then FlexShard's of the fullest stage, or of all."""
    shown = plan.stages if unfolded else (plan.fullest,)
    found = [*_head(plan), "", *_memory(plan), "", *_wire(plan), "", *_time(plan)]
    for stage in shown:
        of = f" (stage {stage.number}, {_blocks(stage)})" if len(plan.stages) > 1 else ""
        found += ["", f"FlexShard{of}: {buckets.lines(stage.flexshard, unfolded)[0]}", *buckets.lines(stage.flexshard, unfolded)[1:]]
    return found


def _head(plan: RunPlan) -> Iterator[str]:
    sizes = " x ".join(f"{axis} {size}" for axis, size in plan.sizes.items() if size > 1 and axis != "ep_shard") or "one process"
    ahead = f" and {count_text(plan.ahead)} that predict further ahead" if plan.ahead else ""
    many = f"{plan.devices} rank{'s' * (plan.devices > 1)}"
    yield f"{plan.recipe.name} on {many}, {plan.device.title} ({sizes}): {count_text(plan.elements - plan.ahead)} parameters{ahead}"
    batches = plan.micro_batches
    pipeline = f", {len(plan.stages)} pipeline ranks by {plan.schedule}" if plan.schedule else ""
    yield f"  {plan.tokens:,} tokens a step, {batches} micro-batch{'es' * (batches > 1)} of {plan.recipe.train.micro_batch} x {plan.recipe.train.sequence_length} on a rank{pipeline}"
    peak, usable = plan.fullest.held.peak, plan.device.usable
    unknown = " (without the optimizer's state, which is unknown)" if plan.fullest.held.optimizer is None else ""
    side = "fits" if plan.fits else "does not fit"
    yield (
        f"  {side}: {size_text(peak)} at most{unknown} of {size_text(usable)} ({size_text(plan.device.memory)} less a reserve of {size_text(plan.device.reserve)}), during {plan.fullest.held.moment}"
    )
    yield f"  predicted step: {plan.step:.3f} s, {plan.tokens / plan.step:,.0f} tokens/s, MFU {plan.mfu:.1%} ({plan.device.measured})"


def _memory(plan: RunPlan) -> list[str]:
    rows: list[Sequence[str]] = [("Bytes of a rank", *_names(plan))]
    for field, words in HELD:
        values = [getattr(stage.held, field) for stage in _shown(plan)]
        if any(value is None or value for value in values):
            rows.append((f"  {words}", *("unknown" if value is None else size_text(value) for value in values)))
    return buckets.table(rows)


def _wire(plan: RunPlan) -> list[str]:
    keys = sorted({key for stage in plan.stages for key in stage.wire})
    rows: list[Sequence[str]] = [("Received by a rank in a step", *_names(plan))]
    rows += [(f"  {what} over {axes}", *(size_text(stage.wire.get((axes, what), 0)) for stage in _shown(plan))) for axes, what in keys]
    return buckets.table(rows) if keys else ["Nothing is received from other ranks."]


def _time(plan: RunPlan) -> list[str]:
    rows: list[Sequence[str]] = [("Seconds of a step", *_names(plan))]
    for field, words in SPENT:
        values = [getattr(stage.spent, field) for stage in _shown(plan)]
        if any(values):
            rows.append((f"  {words}", *(f"{value:.3f}" for value in values)))
    rows.append(("  together", *(f"{stage.spent.step:.3f}" for stage in _shown(plan))))
    rows.append(("TFLOP, recomputation included", *(f"{stage.flops / 1e12:.1f}" for stage in _shown(plan))))
    found = buckets.table(rows)
    if plan.schedule:
        found.append(f"  Pipeline ranks stand idle for {plan.bubble:.1%} of the schedule, the mean of all.")
    return found


def _shown(plan: RunPlan) -> list[StagePlan]:
    """The first, the fullest, the slowest and the last stage."""
    slowest = max(plan.stages, key=lambda each: each.spent.step - each.spent.bubble)
    return list(
        {
            each.number: each for each in sorted((plan.stages[0], plan.fullest, slowest, plan.stages[-1]), key=lambda each: each.number)
        }.values()
    )


def _names(plan: RunPlan) -> list[str]:
    return [f"stage {stage.number}" if len(plan.stages) > 1 else "" for stage in _shown(plan)]


def _blocks(stage: StagePlan) -> str:
    return stage.blocks[0] if len(stage.blocks) == 1 else f"{stage.blocks[0]} to {stage.blocks[-1]}"


# ---------------------------------------------------------------- JSON


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Plain values: everything. Sizes are bytes, times seconds."""
    return {
        "recipe": plan.recipe.name,
        "device": plan.device.name,
        "device_note": plan.device.measured,
        "processes": plan.devices,
        "mesh": dict(plan.sizes),
        "parameters": plan.elements,
        "parameters_ahead": plan.ahead,
        "trained_parameters": plan.trained,
        "micro_batches": plan.micro_batches,
        "tokens": plan.tokens,
        "flops": plan.flops,
        "step_s": plan.step,
        "tokens_per_s": plan.tokens / plan.step,
        "mfu": plan.mfu,
        "peak_memory_bytes": plan.fullest.held.peak,
        "usable_memory_bytes": plan.device.usable,
        "reserve_bytes": plan.device.reserve,
        "fits": plan.fits,
        "schedule": plan.schedule or None,
        "bubble": plan.bubble,
        "stages": [_stage_json(stage) for stage in plan.stages],
    }


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    return {
        "number": stage.number,
        "ranks": stage.ranks,
        "blocks": list(stage.blocks),
        "parameters": stage.elements,
        "bytes": dataclasses.asdict(stage.held),
        "seconds": dataclasses.asdict(stage.spent) | {"step": stage.spent.step},
        "flops": stage.flops,
        "received": [{"axes": axes, "what": what, "bytes": size} for (axes, what), size in sorted(stage.wire.items())],
        "pieces": [
            {
                "stage": traced.index,
                "kind": piece.kind,
                "name": piece.name,
                "count": piece.count,
                **dataclasses.asdict(piece.traced.memory),
                "forward_flops": piece.traced.forward.flops,
                "backward_flops": piece.traced.backward.flops,
            }
            for traced in stage.traced
            for piece in traced.pieces
        ],
        "flexshard": buckets.as_json(stage.flexshard),
    }
