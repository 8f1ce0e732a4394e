"""`intarsia parallel check`: does a family on a mesh compute what one process does? Torch is imported once everything that needs none has been checked."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys

from intarsia import plugins
from intarsia.config import Recipe, resolve
from intarsia.errors import UsageError, did_you_mean
from intarsia.mesh import AXES, check_mesh

# Everything is compared in float32, where a wrong sum is far from rounding.
_FLOAT32 = ("precision.master=float32", "precision.compute=float32", "precision.reduce=float32")

# A row's tokens: odd, so that no degree divides it.
SEQUENCE = 45


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is checked: rows of `sequence` tokens in packed documents, `rows` in each of `micro_batches` micro-batches on each data-parallel rank."""

    sequence: int
    rows: int
    micro_batches: int
    tolerance: float
    device: str
    seed: int
    show_all: bool


class ParallelCommand:
    """Compares a mesh with one process."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The command's arguments."""
        parser.description = (
            "check: start as many processes as the mesh has, build the recipe's model on them and on one process from the same initial values, run one step on "
            "random packed documents in float32, and compare outputs, loss and every gradient by name."
        )
        parser.add_argument("action", choices=("check",), metavar="ACTION", help="what to do: check")
        parser.add_argument(
            "subject",
            help="name of a family (FAMILY or OWNER:FAMILY), whose recipe FAMILY/debug is taken, or any recipe whose model fits into memory",
        )
        parser.add_argument(
            "overrides", nargs="*", default=[], metavar="PATH=VALUE", help="overrides of the recipe, such as model.tied=true"
        )
        parser.add_argument("--mesh", required=True, metavar="AXIS=N,...", help="degrees, such as tp=2,cp=2; others are 1")
        parser.add_argument("--schedule", metavar="NAME", help="pipeline schedule, for pp > 1 (default: the engine's)")
        parser.add_argument("--sequence", type=int, default=SEQUENCE, help=f"tokens in a row (default {SEQUENCE})")
        parser.add_argument("--rows", type=int, default=2, help="rows in a micro-batch on each data-parallel rank (default 2)")
        parser.add_argument(
            "--micro-batches", type=int, metavar="N", help="micro-batches in the step (default 2; twice the stages for pp > 1)"
        )
        parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative error that passes (default 1e-5)")
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it runs (default cpu: gloo)")
        parser.add_argument("--seed", type=int, default=0, help="seed of initial values and tokens")
        parser.add_argument("--all", action="store_true", help="print every parameter, not the worst ones only")

    def run(self, arguments: argparse.Namespace) -> int:
        """Start the ranks, or be one; the exit code is 1 where something differs."""
        degrees = parse_mesh(arguments.mesh)
        world = math.prod(size for axis, size in degrees.items() if axis in AXES)
        for name in ("sequence", "rows", "micro_batches"):
            value = getattr(arguments, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
        if not 0 <= arguments.tolerance < math.inf:
            raise UsageError(f"--tolerance is {arguments.tolerance}; it is a relative error, finite and 0 or more.")
        recipe = recipe_of(arguments, degrees)
        sizes = check_mesh(recipe.mesh, world)
        if world > 1 and "WORLD_SIZE" not in os.environ:
            loaded = plugins.current()
            launch = loaded.target(loaded.registry("launcher").find("local"))
            sys.stdout.flush()
            return int(launch(_again(arguments), world))
        plugins.verify_child()
        if (present := int(os.environ.get("WORLD_SIZE", "1"))) != world:
            raise UsageError(f"--mesh {arguments.mesh} is for {world} processes, and there are {present}.")
        micro_batches = micro_batches_of(arguments, degrees)
        from intarsia_parallel import checking

        settings = Settings(
            arguments.sequence,
            arguments.rows,
            micro_batches,
            arguments.tolerance,
            arguments.device,
            arguments.seed,
            arguments.all,
        )
        return checking.check(recipe, sizes, settings)


def parse_mesh(text: str) -> dict[str, int]:
    """`tp=2,cp=2` as degrees by axis. Raises UsageError."""
    degrees: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        axis, _, size = part.partition("=")
        if axis not in (*AXES, "ep"):
            raise UsageError(f"--mesh {text!r}: there is no axis {axis!r}. {did_you_mean(axis, (*AXES, 'ep'))}")
        if not size.isdecimal() or int(size) < 1:
            raise UsageError(f"--mesh {text!r}: the degree of {axis} is {size!r}; it must be a whole number from 1.")
        if axis in degrees:
            raise UsageError(f"--mesh {text!r} names {axis} twice, as {degrees[axis]} and {size}.")
        degrees[axis] = int(size)
    if not degrees:
        raise UsageError("--mesh names no axis. Write degrees, such as tp=2,cp=2.")
    return degrees


def micro_batches_of(arguments: argparse.Namespace, degrees: dict[str, int]) -> int:
    """Micro-batches in the step: twice the stages, so that every schedule has enough of them; 2 without stages."""
    return int(arguments.micro_batches or 2 * degrees.get("pp", 1))


def recipe_of(arguments: argparse.Namespace, degrees: dict[str, int]) -> Recipe:
    """The recipe that is checked: float32, on this mesh; what the user overrides comes last. Raises UsageError for a family without a debug recipe."""
    registry = plugins.current().registry
    subject: str = arguments.subject
    if subject in {name for entry in registry("model").entries() for name in (entry.name, entry.full_name)}:
        family = registry("model").find(subject)
        mine = [entry for entry in registry("recipe").entries() if entry.owner == family.owner and entry.name.startswith(f"{family.name}/")]
        debug = next((entry for entry in mine if entry.name == f"{family.name}/debug"), None)
        if debug is None:
            known = f"Name one of its recipes ({', '.join(entry.name for entry in mine)})" if mine else "Name a recipe"
            raise UsageError(
                f"The family {subject!r} has no recipe {family.name}/debug to check. {known}, and make its model small by overrides."
            )
        subject = debug.full_name
    mesh = [f"mesh.{axis}={degrees.get(axis, 1)}" for axis in (*AXES, "ep")]
    engine = []
    if degrees.get("pp", 1) > 1:
        engine = ["engine=pipeline"] + ([f"engine.schedule={arguments.schedule}"] if arguments.schedule else [])
    elif arguments.schedule:
        raise UsageError(f"--schedule {arguments.schedule} orders a pipeline's stages: add pp to --mesh.")
    sharder = [] if math.prod(degrees.values()) == 1 else ["sharder=flexshard"]
    rows = arguments.rows * micro_batches_of(arguments, degrees) * degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    train = {"seed": arguments.seed, "sequence_length": arguments.sequence, "micro_batch": arguments.rows, "global_batch": rows}
    step = [f"train.{name}={value}" for name, value in train.items()]
    overrides = [*_FLOAT32, *mesh, *engine, *sharder, *step, *arguments.overrides]
    return resolve(subject, overrides, []).recipe


def _again(arguments: argparse.Namespace) -> list[str]:
    """The command line of a rank."""
    words = ["parallel", "check", arguments.subject, *arguments.overrides, "--mesh", arguments.mesh]
    for name in ("schedule", "sequence", "rows", "micro_batches", "tolerance", "device", "seed"):
        value = getattr(arguments, name)
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    return [*words, *(["--all"] if arguments.all else [])]


command = ParallelCommand()
