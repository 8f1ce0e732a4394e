"""`intarsia pipeline show SCHEDULE`: a schedule on paper. Torch-free."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from typing import Any

import chz
from intarsia import plugins
from intarsia.errors import UsageError, did_you_mean

from intarsia_pipeline import picture
from intarsia_pipeline.actions import Schedule
from intarsia_pipeline.build import KIND, make, name_of, schedule_of
from intarsia_pipeline.config import PipelineScheduleConfig
from intarsia_pipeline.lower import REDUCE, UNSHARD, with_messages, with_sharding
from intarsia_pipeline.simulate import Simulation, Times, simulate
from intarsia_pipeline.validate import validate


class PipelineCommand:
    """Draws a schedule, and says what it costs."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The command's arguments."""
        parser.add_argument("action", choices=("show",), metavar="ACTION", help="what to do: show")
        parser.add_argument("schedule", help="name of a pipeline schedule")
        parser.add_argument(
            "settings", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the schedule, such as virtual_stages=3"
        )
        parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks, mesh.pp (default 4)")
        parser.add_argument("--micro-batches", type=int, default=8, metavar="N", help="micro-batches in a step (default 8)")
        parser.add_argument(
            "--virtual", type=int, metavar="V", help="stages on each rank, for schedules that leave it open: short for virtual_stages=V"
        )
        parser.add_argument(
            "--times",
            default="",
            metavar="NAME=TIME,...",
            help="time of f (forward), i (backward for inputs), w (for weights), b (whole backward; default i + w), pair (a forward beside a backward; default their sum), comm, "
            "unshard, in any unit (default f=1,i=1,w=1)",
        )
        parser.add_argument(
            "--unshard", choices=UNSHARD, default="step", help="when parameters are brought: see engine.unshard (default step)"
        )
        parser.add_argument("--reduce", choices=REDUCE, default="last", help="when gradients are summed: see engine.reduce (default last)")
        parser.add_argument("--actions", action="store_true", help="list every rank's actions instead of the picture")
        parser.add_argument("--all", action="store_true", help=f"draw every rank, also of more than {picture.ROWS}")
        parser.add_argument("--width", type=int, metavar="COLUMNS", help="columns to draw in (default: the terminal's)")
        parser.add_argument("--json", action="store_true", help="print everything as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print to standard output."""
        config = config_of(arguments.schedule, arguments.settings, arguments.virtual)
        times = times_of(arguments.times)
        bare = make(config, arguments.ranks, arguments.micro_batches)
        validate(bare)
        full = with_messages(with_sharding(bare, arguments.unshard, reduce=arguments.reduce))
        validate(full)
        simulation = simulate(full if times.unshard else bare, times)
        least = schedule_of(config).least(arguments.ranks)
        if arguments.json:
            print(json.dumps(as_json(full, simulation, times, least), allow_nan=False))
            return 0
        if arguments.actions:
            lines = [f"rank {rank}: " + " ".join(map(short, actions)) for rank, actions in enumerate(full.plan)]
        else:
            width = arguments.width or shutil.get_terminal_size((120, 24)).columns
            lines = [*picture.draw(bare, simulation, max(width, 24), arguments.all), picture.legend(bare)]
        lines += ["", *picture.summary(bare, simulation)]
        if arguments.micro_batches < least:
            lines.append(
                f"needs {least} micro-batches to keep every rank busy; the engine runs fewer only with engine.few_micro_batches=True"
            )
        print("\n".join(lines))
        return 0


def config_of(name: str, settings: list[str], virtual: int | None = None) -> PipelineScheduleConfig:
    """The settings of a schedule by its name, with NAME=VALUE."""
    loaded = plugins.current()
    entry = loaded.registry(KIND).find(name)
    made: Any = loaded.config_class(entry)
    fields = chz.chz_fields(made)
    given: dict[str, str] = {"virtual_stages": str(virtual)} if virtual is not None else {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{text!r} is no setting; settings are NAME=VALUE.")
        if key in given:
            raise UsageError(f"Schedule {name!r}: {key} is given twice, as {given[key]} and {value}.")
        given[key] = value
    values: dict[str, Any] = {}
    for key, text in given.items():
        if key == "virtual_stages" and key not in fields and virtual is not None:
            _check_virtual(made(), virtual)
            continue
        if key not in fields:
            raise UsageError(f"Schedule {name!r} has no setting {key!r}. {did_you_mean(key, fields)}")
        values[key] = _value(text)
    try:
        config: PipelineScheduleConfig = made(**values)
    except TypeError as error:
        raise UsageError(f"Schedule {name!r}: {error}") from error
    return config


def _check_virtual(config: PipelineScheduleConfig, virtual: int) -> None:
    there = len(schedule_of(config).placement(2)) // 2
    if there != virtual:
        raise UsageError(
            f"Schedule {name_of(config)!r} has {there} stage{'s' * (there > 1)} on each rank, not {virtual}. `interleaved` has as many as you say."
        )


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text


def times_of(text: str) -> Times:
    """Times from `f=1,i=1.2`. UsageError for what is none."""
    names = [field.name for field in dataclasses.fields(Times) if field.name != "reduce"]
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in names:
            raise UsageError(f"--times: there is no time {name!r}. {did_you_mean(name, names)}")
        if name in values:
            raise UsageError(f"--times names {name} twice.")
        try:
            values[name] = float(value)
        except ValueError:
            raise UsageError(f"--times: {name} is {value!r}, which is no number.") from None
    return Times(**values)


def short(action: Any) -> str:
    """`F 3:5`: stage 3, micro-batch 5."""
    where = str(action.stage) if action.micro_batch < 0 else f"{action.stage}:{action.micro_batch}"
    return f"{'&' if action.beside else ''}{action.kind}({where})"


def as_json(schedule: Schedule, simulation: Simulation, times: Times, least: int) -> dict[str, Any]:
    """Everything."""
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "placement": list(schedule.placement),
        "micro_batches": schedule.micro_batches,
        "least_micro_batches": least,
        "times": dataclasses.asdict(times),
        **simulation.facts(),
        "plan": [[list(action[:3]) + ([True] if action.beside else []) for action in actions] for actions in schedule.plan],
        "spans": [
            [[span.action.kind, span.action.stage, span.action.micro_batch, span.start, span.end] for span in spans]
            for spans in simulation.spans
        ],
    }


command = PipelineCommand()
