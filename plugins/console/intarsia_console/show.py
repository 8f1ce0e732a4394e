"""`intarsia show RUN`: a run's curves and facts, from its directory alone. Imports no torch."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intarsia.errors import UsageError
from intarsia.train.run_directory import is_run

from intarsia_console.events import read_events
from intarsia_console.progress import clock, short
from intarsia_console.timeline import lines as timeline_lines

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=+*%#"
CURVES = (("rollouts", "reward"), ("held_out", "reward"), ("step", "loss"), ("evaluation", "bits_per_byte"), ("evaluation", "loss"), ("step", "gradient_norm"), ("step", "learning_rate"), ("step", "tokens_per_s"))  # fmt: skip

Event = Mapping[str, Any]


class ShowCommand:
    """Prints a run."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The command's arguments."""
        parser.add_argument("run", type=Path, help="run directory")
        parser.add_argument("--json", action="store_true", help="print facts and curves as JSON")
        parser.add_argument("--width", type=int, default=60, help="characters in a curve (default 60)")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print to standard output."""
        if not is_run(arguments.run):
            raise UsageError(
                f"{arguments.run} is no run directory (it has no recipe.json). `intarsia train` makes them, by default under runs/."
            )
        found = summary(arguments.run)
        bars = BARS if (sys.stdout.encoding or "").lower().startswith("utf") else ASCII_BARS
        print(json.dumps(found, indent=2) if arguments.json else "\n".join(text_lines(found, max(10, arguments.width), bars)))
        return 0


def summary(directory: Path) -> dict[str, Any]:
    """All that is shown, as JSON. A run that was resumed has the steps of its last attempt where attempts overlap."""
    events = list(read_events(directory))
    starts, ends = of_kind(events, "run_start"), of_kind(events, "run_end")
    start: Event = starts[-1] if starts else {}
    ended = bool(ends) and (not starts or ends[-1]["time_s"] >= start["time_s"])
    parameters = [event["parameters"] for event in of_kind(events, "build") if "parameters" in event]
    return {
        "directory": str(directory),
        "run": start.get("run"),
        "outcome": ends[-1]["outcome"] if ended else "running or killed",
        "reason": ends[-1].get("reason") if ended else None,
        "error": ends[-1].get("error") if ended else None,
        "steps": start.get("steps"),
        "attempts": len(starts),
        "parameters": parameters[-1] if parameters else None,
        "world": start.get("world"),
        "device": start.get("device"),
        "versions": start.get("versions"),
        "seconds_s": attempt_seconds(events),
        "curves": {f"{kind}.{name}": curve(events, kind, name) for kind, name in CURVES},
        "checkpoints": [{"step": event["step"], "location": event["location"]} for event in of_kind(events, "checkpoint")],
        "resumes": [{"step": event["step"], "location": event["location"]} for event in of_kind(events, "resume")],
        "timelines": of_kind(events, "timeline"),
        "warnings": [event["message"] for event in of_kind(events, "warning")],
        "last": of_kind(events, "step")[-1] if of_kind(events, "step") else None,
    }


def of_kind(events: Sequence[Event], kind: str) -> list[Event]:
    """The events of one name."""
    return [event for event in events if event["event"] == kind]


def attempt_seconds(events: Sequence[Event]) -> float:
    """Wall time of all attempts together, each up to its last event."""
    total = last = 0.0
    for event in events:
        if event["event"] == "run_start":
            total, last = total + last, 0.0
        if event["event"] != "generate":
            last = event["elapsed_s"]
    return total + last


def curve(events: Sequence[Event], kind: str, name: str) -> list[list[float]]:
    """[step, value] in order of steps; of a step that was done again the last value."""
    points = {event["step"]: event[name] for event in of_kind(events, kind) if isinstance(event.get(name), int | float)}
    return [[step, points[step]] for step in sorted(points)]


def spark(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """A line of at most `width` bars; each is the mean of the values that fall on it, the lowest value of all the lowest bar."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * number // count for number in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(bars[min(len(bars) - 1, int((mean - low) / span * len(bars)))] for mean in means)


def text_lines(found: Mapping[str, Any], width: int, bars: str) -> list[str]:
    """The summary for people."""
    done = found["last"]["step"] if found["last"] else 0
    error = found["error"]
    why = found["reason"] or (f"{error['type']}: {error['message'].splitlines()[0] if error['message'] else ''}" if error else "")
    lines = [f"{found['run']}  {found['directory']}", f"  outcome      {found['outcome']}{': ' + why if why else ''}"]
    attempts = f" in {found['attempts']} attempts" if found["attempts"] > 1 else ""
    lines.append(f"  steps        {done} of {found['steps']}, {clock(found['seconds_s'])}{attempts}")
    if found["parameters"]:
        lines.append(f"  parameters   {short(found['parameters'])}")
    if found["device"]:
        versions = ", ".join(f"{name} {version}" for name, version in (found["versions"] or {}).items())
        lines.append(f"  where        {found['world']} x {found['device']}; {versions}")
    for name, points in found["curves"].items():
        values = [value for _, value in points if math.isfinite(value)]
        if values:
            lines.append(f"  {name:<24} {spark(values, width, bars)}  {values[0]:.4g} -> {values[-1]:.4g} (least {min(values):.4g})")
    for name in ("checkpoints", "resumes"):
        for entry in found[name]:
            lines.append(f"  {name[:-1]:<12} after step {entry['step']}  {entry['location']}")
    for event in found["timelines"]:
        lines += ["", f"  step {event['step']} on rank {event['rank']}", *(f"    {line}" for line in timeline_lines(event))]
        lines += (
            []
            if event is not found["timelines"][-1]
            else ["    times in ms; wait: for the gather, then for the sum; exposed: both together", ""]
        )
    return lines + [f"  warning      {text}" for text in found["warnings"]]


command = ShowCommand()
