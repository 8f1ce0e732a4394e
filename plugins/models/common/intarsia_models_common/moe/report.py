"""`intarsia moe report RUN`: a heat-map of how busy experts were. Torch-free."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from intarsia.errors import UsageError, did_you_mean
from intarsia.train.events import FILE

SHADES = " .:-=+*#%@"
COLUMNS = 128
"""Characters of a row; more experts than that are joined, neighbours together."""


class MoECommand:
    """The command `moe`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`moe report RUN [--layer L] [--step S]`."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="report")
        report = actions.add_parser("report", help="a heat-map: layers by experts, or one layer's steps by experts")
        report.add_argument("run", type=Path, help="run directory")
        report.add_argument("--step", type=int, help="the step to show, of those that were logged; the last one by default")
        report.add_argument("--layer", help="show this layer over all logged steps")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print it."""
        print("\n".join(report(arguments.run, arguments.step, arguments.layer)))
        return 0


def events_of(directory: Path) -> list[dict[str, Any]]:
    """The events `moe` of a run, in order; a step that was run again after a resume counts as it ran last. A line that is not whole (the run is writing it, or was
    killed while it did) is left out."""
    path = directory / FILE
    if not path.is_file():
        raise UsageError(f"{path} is not there: name the directory of a run.")
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if '"moe"' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") == "moe":
            found[event["step"]] = event
    if not found:
        raise UsageError(f"{path} has no event `moe`: the model has no routers, or no step was logged (train.log_every).")
    return [found[step] for step in sorted(found)]


def report(directory: Path, step: int | None = None, layer: str | None = None) -> Iterator[str]:
    """The lines of the heat-map."""
    events = events_of(directory)
    if layer is not None:
        known = list(events[-1]["layers"])
        if layer not in known:
            raise UsageError(f"The run has no layer {layer!r} with experts. {did_you_mean(layer, known)}")
        yield f"layer {layer}, steps {events[0]['step']} to {events[-1]['step']}"
        yield from heat_map({f"step {event['step']}": event["layers"][layer] for event in events if layer in event["layers"]})
        return
    steps = [event["step"] for event in events]
    if step is not None and step not in steps:
        raise UsageError(f"Step {step} was not logged. Nearest: {min(steps, key=lambda each: abs(each - step))}.")
    chosen = events[-1] if step is None else events[steps.index(step)]
    yield f"step {chosen['step']}"
    yield from heat_map({f"layer {label}": facts for label, facts in chosen["layers"].items()})


def heat_map(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """One line for each row: a shade for each expert, from nothing over the mean load (in the middle) to twice it and more."""
    widest = max(len(label) for label in rows)
    experts = max(len(facts["load"]) for facts in rows.values())
    joined = -(-experts // COLUMNS)
    yield f"{experts} experts{f', {joined} to a character' if joined > 1 else ''}; '{SHADES[0]}' idle, '{SHADES[len(SHADES) // 2]}' the mean load, '{SHADES[-1]}' twice it or more"
    for label, facts in rows.items():
        shades = "".join(shade(value) for value in _joined(facts["load"], joined))
        dropped = f" dropped {facts['dropped']:.2%}" if facts["dropped"] else ""
        # A router whose scores are not finite has chosen experts nevertheless; events have null for such numbers.
        entropy = "not finite" if facts["entropy"] is None else f"{facts['entropy']:.2f}"
        yield f"{label:>{widest}} |{shades}| max violation {facts['max_violation']:.2f} entropy {entropy}{dropped}"


def _joined(load: Sequence[float], width: int) -> list[float]:
    """Loads over the mean one, `width` neighbours joined."""
    groups = [load[start : start + width] for start in range(0, len(load), width)]
    return [sum(group) * len(load) / len(group) for group in groups]


def shade(value: float) -> str:
    """The character for a load over the mean one."""
    return SHADES[min(len(SHADES) - 1, int(value * len(SHADES) / 2))]
