"""`intarsia plan`: what a recipe takes on any number of devices, without starting one. torch is imported when the model's shapes are needed."""

from __future__ import annotations

import argparse
import json
from typing import Any

from intarsia import plugins
from intarsia.config import Recipe, resolve
from intarsia.errors import UsageError
from intarsia.mesh import AXES, check_mesh

from intarsia_planner import devices

# Ranks over which dp_shard=-1 is planned where --gpus does not say.
DEFAULT_SHARDS = 8


class PlanCommand:
    """Prints memory, communication, step time and MFU, and FlexShard's buckets."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The command's arguments."""
        parser.add_argument("recipe", help="name of a recipe, path.py:function, run directory or recipe.json")
        parser.add_argument(
            "overrides", nargs="*", default=[], metavar="PATH=VALUE", help="overrides, such as mesh.tp=8 train.micro_batch=2"
        )
        parser.add_argument(
            "--with", dest="transforms", action="append", default=[], metavar="TRANSFORM", help="apply a transform (repeatable)"
        )
        parser.add_argument(
            "--gpus",
            "--processes",
            dest="processes",
            type=int,
            metavar="N",
            help=f"plan for N devices, one process each (default: as many as the mesh has, with {DEFAULT_SHARDS} where mesh.dp_shard is -1)",
        )
        parser.add_argument("--device", default="h200", metavar="DEVICE", help=f"one of {', '.join(devices.DEVICES)} (default: h200)")
        parser.add_argument("--all", action="store_true", help="every stage, and every bucket without folding equal ones")
        parser.add_argument("--json", action="store_true", help="print everything, each stage, rank and bucket, as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print to standard output."""
        device = devices.find(arguments.device)
        recipe = resolve(arguments.recipe, arguments.overrides, arguments.transforms).recipe
        sizes = check_mesh(recipe.mesh, processes(recipe, arguments.processes))
        from intarsia_planner import plan, report

        made = plan.make_plan(recipe, sizes, device, plugins.current())
        print(
            json.dumps(report.as_json(made), indent=2, allow_nan=False) if arguments.json else "\n".join(report.lines(made, arguments.all))
        )
        return 0


def processes(recipe: Recipe, wanted: int | None) -> int:
    """The number of processes to plan for. Raises UsageError for less than one."""
    if wanted is not None:
        if wanted < 1:
            raise UsageError(f"--gpus is {wanted}; a run has at least one process.")
        return wanted
    degrees: list[Any] = [getattr(recipe.mesh, axis) for axis in AXES]
    total = 1
    for degree in degrees:
        total *= DEFAULT_SHARDS if degree == -1 else max(degree, 1)
    return total


command = PlanCommand()
