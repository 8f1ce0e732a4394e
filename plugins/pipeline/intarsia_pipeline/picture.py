"""A schedule as text: time to the right, a row for each rank. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intarsia_pipeline.actions import Action, Schedule
from intarsia_pipeline.simulate import Simulation, Span

# Ranks that are drawn before those in the middle are left out.
ROWS = 32

IDLE = "·"


def draw(schedule: Schedule, simulation: Simulation, width: int = 120, all_ranks: bool = False) -> list[str]:
    """Lines of at most `width` characters (more where one action needs more); a long schedule goes on below. Bubbles are dots, `|` begins each action."""
    labels = [[label(schedule, rank, group) for group in grouped(spans)] for rank, spans in enumerate(simulation.spans)]
    per_unit = _columns_per_unit(simulation, labels)
    rows = [_row(simulation.spans[rank], texts, per_unit, _begin(simulation)) for rank, texts in enumerate(labels)]
    total = max(map(len, rows), default=0)
    rows = [row.ljust(total, IDLE) for row in rows]
    names = [f"rank {rank}" for rank in range(schedule.ranks)]
    margin = max(map(len, names), default=0) + 1
    # Panels begin at whole units of time where these are wide enough to matter.
    step = max(width - margin, 8)
    step = max(int(step // per_unit * per_unit), 8) if per_unit > 1 and per_unit == int(per_unit) else step
    shown = list(range(schedule.ranks))
    if not all_ranks and schedule.ranks > ROWS:
        shown = [*range(ROWS // 2), -1, *range(schedule.ranks - ROWS // 2, schedule.ranks)]
    lines: list[str] = []
    for start in range(0, total, step):
        if start:
            lines.append("")
        lines.append(" " * margin + _ruler(start, min(step, total - start), per_unit))
        for rank in shown:
            lines.append("..." if rank < 0 else names[rank].ljust(margin) + rows[rank][start : start + step])
    return lines


def legend(schedule: Schedule) -> str:
    """What the letters mean."""
    kinds = {action.kind for actions in schedule.plan for action in actions}
    meaning = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "for weights"}
    parts = [f"{kind} {text}" for kind, text in meaning.items() if kind in kinds]
    stages = len(schedule.own(0))
    if stages == 2:
        parts.append("small letters: the rank's second stage")
    elif stages > 2:
        parts.append("F2.5: the rank's stage 2 (of 0, 1, ...), micro-batch 5")
    if any(action.beside for actions in schedule.plan for action in actions):
        parts.append("F5&b3: beside each other")
    return "; ".join([*parts, "number: micro-batch; dots: idle"])


def label(schedule: Schedule, rank: int, group: Sequence[Span]) -> str:
    """The text of one action, or of those beside each other."""
    return "&".join(_text(schedule, rank, span.action) for span in group)


def _text(schedule: Schedule, rank: int, action: Action) -> str:
    own = schedule.own(rank)
    place = own.index(action.stage)
    if len(own) > 2:
        return f"{action.kind}{place}.{action.micro_batch}"
    return f"{action.kind.lower() if place else action.kind}{action.micro_batch}"


def grouped(spans: Sequence[Span]) -> list[list[Span]]:
    """Actions with those beside them."""
    groups: list[list[Span]] = []
    for span in spans:
        if span.action.beside:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _begin(simulation: Simulation) -> float:
    return min((spans[0].start for spans in simulation.spans if spans), default=0.0)


def _columns_per_unit(simulation: Simulation, labels: list[list[str]]) -> float:
    """So many that each text fits into its action, with one for the bar before it."""
    needed = 0.0
    for spans, texts in zip(simulation.spans, labels, strict=True):
        for group, text in zip(grouped(spans), texts, strict=True):
            length = group[0].end - group[0].start
            if length > 0:
                needed = max(needed, (len(text) + 1) / length)
    return min(needed, 64.0) if needed else 1.0


def _row(spans: Sequence[Span], texts: list[str], per_unit: float, begin: float) -> str:
    row = ""
    for group, text in zip(grouped(spans), texts, strict=True):
        start, end = (math.floor((value - begin) * per_unit + 0.5) for value in (group[0].start, group[0].end))
        if end > start:
            row = row.ljust(start, IDLE) + ("|" + text)[: end - start].ljust(end - start)
    return row


def _ruler(start: int, columns: int, per_unit: float) -> str:
    """Times above the columns, at round numbers that leave room."""
    unit = 1.0
    while unit * per_unit < 8:
        unit *= 2 if str(unit).lstrip("0.").startswith(("1", "5")) else 2.5
    ruler = ""
    number = math.ceil(start / per_unit / unit)
    while (column := math.floor(number * unit * per_unit + 0.5) - start) < columns:
        ruler = ruler.ljust(column) + f"{number * unit:g}"
        number += 1
    return ruler[:columns]


def summary(schedule: Schedule, simulation: Simulation) -> list[str]:
    """The numbers below a picture."""
    virtual = schedule.stages // schedule.ranks
    stages = f"{schedule.stages} stages" + (f", {virtual} on each rank" if virtual > 1 else "")
    idle = max(simulation.idle)
    lines = [
        f"{schedule.name}: {schedule.ranks} ranks, {stages}, {schedule.micro_batches} micro-batches",
        f"makespan {simulation.makespan:g}, of which ranks stand idle {_range(simulation.idle)} ({simulation.idle_share:.1%} on average)",
    ]
    if abs(simulation.bubble - idle) > 1e-9 * max(1.0, simulation.makespan):
        lines.append(f"bubble within a rank's own first and last action: at most {simulation.bubble:g}")
    lines.append(f"activations kept at most (each of one stage and micro-batch): {_range(simulation.peak_live)}")
    return lines


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if math.isclose(low, high, abs_tol=1e-12) else f"{low:g} to {high:g}"
