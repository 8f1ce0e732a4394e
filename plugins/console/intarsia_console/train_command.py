"""`intarsia train`: a new run by a recipe, or more of an old one. torch is imported only once everything that needs none has been checked."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from intarsia import plugins
from intarsia.config import Resolved, resolve
from intarsia.config.resolve import load_saved
from intarsia.errors import UsageError
from intarsia.mesh import check_mesh
from intarsia.train.run_directory import RECIPE, default_directory, is_run


class TrainCommand:
    """Trains."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The command's arguments."""
        parser.add_argument(
            "recipe",
            nargs="?",
            help="name of a recipe, path.py:function, run directory or recipe.json (for a new run with its settings); may be left out with --resume DIR",
        )
        parser.add_argument(
            "overrides", nargs="*", default=[], metavar="PATH=VALUE", help="overrides, such as train.steps=200 optimizer=adamw"
        )
        parser.add_argument(
            "--with", dest="transforms", action="append", default=[], metavar="TRANSFORM", help="apply a transform (repeatable)"
        )
        place = parser.add_mutually_exclusive_group()
        place.add_argument("--dir", type=Path, metavar="DIR", help="the run's directory (default: a new one, runs/NAME-DATE-TIME)")
        place.add_argument("--name", metavar="NAME", help="the run's directory is runs/NAME")
        parser.add_argument(
            "--resume",
            nargs="?",
            const="",
            metavar="DIR",
            help="go on with the run in DIR (or --dir, --name, else the newest run of the recipe)",
        )
        parser.add_argument(
            "--init-from", metavar="SOURCE", help="begin with the weights of a run, a checkpoint or a Hugging Face folder (train.init_from)"
        )
        parser.add_argument("--allow-changes", action="store_true", help="resume even where recipe or plugins differ from the checkpoint's")
        parser.add_argument("--processes", type=int, metavar="N", help="start N processes on this machine (or use torchrun)")
        parser.add_argument("--quiet", action="store_true", help="no progress on the terminal; events.jsonl has everything")

    def run(self, arguments: argparse.Namespace) -> int:
        """Check, then train here or start the ranks."""
        # Above all levels: on a CPU, kineto would print a line at the beginning and one at the end of each trace.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        if arguments.recipe and "=" in arguments.recipe:  # `train --resume DIR train.steps=200`
            arguments.overrides.insert(0, arguments.recipe)
            arguments.recipe = None
        if arguments.resume and "=" in arguments.resume and not Path(arguments.resume).exists():  # `train RECIPE --resume train.steps=200`
            arguments.overrides.insert(0, arguments.resume)
            arguments.resume = ""
        directory, resuming = _directory(arguments), arguments.resume is not None
        if arguments.init_from is not None:
            if resuming:
                raise UsageError("--init-from begins a new run, --resume goes on with an old one: leave out one of them.")
            arguments.overrides.append(f"train.init_from={arguments.init_from}")
        resolved = _resolve(arguments, directory)
        if resuming and directory is None:
            directory = newest_run(resolved.recipe.name)
            resolved = load_saved(directory, arguments.overrides, arguments.transforms)
        plugins.verify_child()
        if not resuming and arguments.recipe and "WORLD_SIZE" not in os.environ and is_run(Path(arguments.recipe)):
            hint = f"To go on with that run: intarsia train --resume {arguments.recipe}"
            print(f"{arguments.recipe} is taken as a recipe; this is a new run. {hint}", file=sys.stderr)
        processes = int(os.environ.get("WORLD_SIZE", "1")) if arguments.processes is None else arguments.processes
        if processes < 1:
            raise UsageError(f"--processes is {processes}; it must be at least 1.")
        check_mesh(resolved.recipe.mesh, processes)
        if arguments.processes is not None and processes > 1:
            return _launch(arguments, directory or default_directory(resolved.recipe.name), processes)
        from intarsia.train.trainer import Request, train

        train(Request(resolved, plugins.current(), directory, resuming, arguments.allow_changes, not arguments.quiet))
        return 0


def _directory(arguments: argparse.Namespace) -> Path | None:
    """The run directory as far as the arguments name it."""
    named = arguments.dir or (Path("runs") / arguments.name if arguments.name else None)
    if arguments.resume:
        if named is not None:
            raise UsageError("--resume DIR names the run directory already: leave out --dir and --name.")
        return Path(arguments.resume)
    if arguments.resume == "" and named is None and arguments.recipe and is_run(Path(arguments.recipe)):
        return Path(arguments.recipe)  # `train runs/x --resume`
    return named


def _resolve(arguments: argparse.Namespace, directory: Path | None) -> Resolved:
    """The recipe. A resumed run's own one is taken where none is named."""
    if arguments.recipe is not None:
        return resolve(arguments.recipe, arguments.overrides, arguments.transforms)
    if arguments.resume is None:
        raise UsageError("Which recipe? `intarsia config` lists them; `intarsia train --resume DIR` goes on with a run.")
    if directory is None:
        raise UsageError("Which run? Name its directory: `intarsia train --resume DIR`.")
    if not is_run(directory):
        raise UsageError(f"{directory} is no run directory (it has no recipe.json), so there is nothing to resume.")
    return load_saved(directory, arguments.overrides, arguments.transforms)


def _launch(arguments: argparse.Namespace, directory: Path, processes: int) -> int:
    if "WORLD_SIZE" in os.environ:
        raise UsageError("--processes starts the processes itself: don't use it under torchrun, which has started them already.")
    loaded = plugins.current()
    launch = loaded.target(loaded.registry("launcher").find("local"))
    command = ["train", *([arguments.recipe] if arguments.recipe else []), *arguments.overrides]
    command += [part for name in arguments.transforms for part in ("--with", name)]
    command += ["--dir", str(directory)] if arguments.resume is None else ["--resume", str(directory)]
    command += [flag for flag, given in (("--allow-changes", arguments.allow_changes), ("--quiet", arguments.quiet)) if given]
    sys.stdout.flush()
    return int(launch(command, processes))


command = TrainCommand()


def newest_run(name: str, parent: Path = Path("runs")) -> Path:
    """The newest run of this name below `parent`. Raises UsageError when there is none."""
    prefix = name.replace("/", "-")
    runs = [path for glob in (prefix, f"{prefix}-*") for path in parent.glob(glob) if is_run(path)]
    if not runs:
        raise UsageError(f"There is nothing to resume: no run of {name!r} under {parent}/. Name its directory: --resume DIR.")
    return max(runs, key=lambda path: (path / RECIPE).stat().st_mtime)
