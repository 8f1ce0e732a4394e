"""`intarsia plan`: what a recipe's buckets take and move on any number of processes, without starting one. torch is imported when the model's shapes are needed."""

from __future__ import annotations

import argparse
import json
from typing import Any

from intarsia import plugins
from intarsia.config import Recipe, resolve
from intarsia.errors import UsageError
from intarsia.mesh import AXES, check_mesh

from intarsia_flexshard.config import FlexShardConfig

# Ranks over which dp_shard=-1 is planned where --processes does not say.
DEFAULT_SHARDS = 8


class PlanCommand:
    """Prints bytes by rank and by bucket, and what a step moves."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The command's arguments."""
        parser.add_argument("recipe", help="name of a recipe, path.py:function, run directory or recipe.json")
        parser.add_argument("overrides", nargs="*", default=[], metavar="PATH=VALUE", help="overrides, such as sharder.placement=flat")
        parser.add_argument(
            "--with", dest="transforms", action="append", default=[], metavar="TRANSFORM", help="apply a transform (repeatable)"
        )
        parser.add_argument(
            "--processes",
            type=int,
            metavar="N",
            help=f"plan for N processes (default: as many as the mesh has, with {DEFAULT_SHARDS} where mesh.dp_shard is -1)",
        )
        parser.add_argument("--all", action="store_true", help="do not fold equal buckets")
        parser.add_argument("--json", action="store_true", help="print everything, each rank and each bucket, as JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print to standard output."""
        recipe = resolve(arguments.recipe, arguments.overrides, arguments.transforms).recipe
        if not isinstance(recipe.sharder, FlexShardConfig):
            raise UsageError(
                f"`intarsia plan` plans the buckets of FlexShard, but the recipe's sharder is {type(recipe.sharder).__name__}. Add sharder=flexshard."
            )
        sizes = check_mesh(recipe.mesh, processes(recipe, arguments.processes))
        from intarsia_flexshard import planning, report

        plan = planning.make_plan(recipe, sizes, plugins.current())
        print(
            json.dumps(report.as_json(plan), indent=2, allow_nan=False) if arguments.json else "\n".join(report.lines(plan, arguments.all))
        )
        return 0


def processes(recipe: Recipe, wanted: int | None) -> int:
    """The number of processes to plan for. Raises UsageError for less than one."""
    if wanted is not None:
        if wanted < 1:
            raise UsageError(f"--processes is {wanted}; a run has at least one.")
        return wanted
    degrees: list[Any] = [getattr(recipe.mesh, axis) for axis in AXES]
    total = 1
    for degree in degrees:
        total *= DEFAULT_SHARDS if degree == -1 else max(degree, 1)
    return total


command = PlanCommand()
