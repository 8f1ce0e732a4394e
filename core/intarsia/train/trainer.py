"""The run loop: from a resolved recipe to a finished, stopped or failed run."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import intarsia
from intarsia import device as devices
from intarsia.checkpoint import compare_facts
from intarsia.checkpoint.commit import load_manifest
from intarsia.checkpoint.facts import check_changes
from intarsia.checkpoint.manifest import MARKER
from intarsia.checkpoint.weights import model_differences, open_weights
from intarsia.comm import Communicator, init_world
from intarsia.config import ProfileConfig, Resolved
from intarsia.contracts import Run, StepSummary
from intarsia.discovery import describe
from intarsia.errors import CheckpointError, IntarsiaError, PluginError, StoppedWithCheckpoint, UsageError
from intarsia.hooks import undisturbed
from intarsia.mesh import check_mesh
from intarsia.plugins import Plugins, check_same_plugins
from intarsia.train.build import build, choose_kernels
from intarsia.train.built import Built
from intarsia.train.evaluate import evaluate
from intarsia.train.events import EventLog
from intarsia.train.run_directory import PLUGINS, RECIPE, RESOLVED, RunDirectory, default_directory
from intarsia.train.signals import StopSignals
from intarsia.train.state import ModelState, Progress
from intarsia.train.step import Flags, train_step

logger = logging.getLogger("intarsia.train")


@dataclasses.dataclass(frozen=True)
class Request:
    """What `intarsia train` was asked for; `directory` None: a new one under runs/."""

    resolved: Resolved
    plugins: Plugins
    directory: Path | None = None
    resume: bool = False
    allow_changes: bool = False
    show: bool = True


def train(request: Request) -> Run:
    """Run it in this process, which is one rank of torchrun's environment or alone. Returns the finished run.

    Raises StoppedWithCheckpoint after an orderly stop, and the IntarsiaError that ended a run otherwise.
    """
    recipe = request.resolved.recipe
    sizes = check_mesh(recipe.mesh, int(os.environ.get("WORLD_SIZE", "1")))
    device = devices.select(recipe.train.device)
    set_up_torch(recipe.train.threads, recipe.train.deterministic)
    choose_kernels(request.resolved, request.plugins)
    world = init_world(device)
    try:
        check_same_plugins(world, request.plugins)
        world.agree(request.resolved.resolved_json()["values"], "the recipe")
        directory = claim_directory(request, world)
        try:
            return Trainer(request, world, device, sizes, directory).run_all()
        finally:
            directory.release()
    finally:
        world.close()


def set_up_torch(threads: int | None, deterministic: bool) -> None:
    """Process-wide settings of torch."""
    if threads is not None:
        torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # What cuBLAS needs to be deterministic.
        torch.use_deterministic_algorithms(True)


def claim_directory(request: Request, world: Communicator) -> RunDirectory:
    """Rank 0 makes or finds the run directory and locks it; every rank learns where it is, or raises rank 0's error."""
    chosen: list[Any] = [None, None]
    directory = RunDirectory(request.directory or default_directory(request.resolved.recipe.name))
    if world.rank == 0:
        try:
            directory.create(request.resume)
            chosen = [str(directory.path), None]
        except UsageError as error:
            chosen = [None, str(error)]
    path, problem = world.broadcast_json(chosen, what="run directory")
    if problem:
        raise UsageError(problem)
    return directory if world.rank == 0 else RunDirectory(Path(path))


class Trainer:
    """One run in one process."""

    def __init__(self, request: Request, world: Communicator, device: torch.device, sizes: dict[str, int], directory: RunDirectory):
        self._request, self._directory, self._sizes = request, directory, sizes
        self._recipe = request.resolved.recipe
        events = EventLog(directory.path) if world.rank == 0 else None
        run = Run(self._recipe, directory.path, world.rank, world.size, record=events.write if events else Run.record)
        self._built = Built(run, request.resolved, request.plugins, request.plugins.hooks, world, device, events)
        self._built.progress = Progress(run)
        self._signals = StopSignals()
        self._failure: CheckpointError | None = None
        self._saved_step = self._evaluated_step = -1
        self._durable_step: int | None = None
        self._window: list[StepSummary] = []
        self._peak_flops = devices.peak_flops(device, self._recipe.precision.compute)
        self._facts: dict[str, Any] = {
            "recipe": {path: entry["value"] for path, entry in request.resolved.resolved_json()["values"].items()},
            "plugins": request.plugins.facts(),
            "world": world.size,
            "mesh": dict(sizes),
        }
        self._error: dict[str, str] | None = None
        self._has_frozen = False

    def run_all(self) -> Run:
        """Everything between the claimed directory and its release."""
        built, run = self._built, self._built.run
        outcome = "failed"
        if built.events is not None:
            self._open_events(built.events)
        try:
            with self._signals:
                self._set_up()
                outcome = self._finish(self._loop())
        except BaseException as error:
            self._error = {"type": type(error).__name__, "message": str(error)}
            built.hooks.on_run_error(run=run, error=error)
            if isinstance(error, SystemExit):  # it could say that all went well
                raise PluginError(f"a plugin's code ended the run by SystemExit: {describe(error)}") from error
            raise
        finally:
            self._close_parts()
            built.hooks.after_run(run=run, outcome=outcome)
            self._warn_of_hooks()
            built.event(
                "run_end",
                outcome=outcome,
                step=run.step,
                reason=run.stop_reason,
                checkpoint_step=self._durable_step,
                tokens_total=built.progress.tokens,
                error=self._error,
            )
            if built.events is not None:
                built.events.close()
        if outcome == "stopped":
            raise StoppedWithCheckpoint(self._stopped_text())
        return run

    # ------------------------------------------------------------ beginning

    def _open_events(self, events: EventLog) -> None:
        """The recipe's sinks, and `progress` where a plugin offers it."""
        plugins = self._request.plugins
        shown = [entry for entry in plugins.registry("metric sink").entries() if entry.name == "progress" and self._request.show]
        for config in (*(plugins.config_class(entry)() for entry in shown), *self._recipe.sinks):
            events.add_sink(plugins.entry_of(config).full_name, plugins.build(config, self._directory.path))

    def _set_up(self) -> None:
        built = self._built
        built.event(
            "run_start",
            run=self._recipe.name,
            directory=str(self._directory.path),
            resume=self._request.resume,
            steps=self._recipe.train.steps,
            world=built.world.size,
            mesh=self._sizes,
            device=devices.describe(built.device),
            versions={"intarsia": intarsia.__version__, "torch": torch.__version__, "python": platform.python_version()},
            host=platform.node(),
            pid=os.getpid(),
            plugins=self._request.plugins.fingerprint(),
        )
        if not self._request.resume:  # A resume that is refused must leave the files as they are.
            self._write_files()
        built.hooks.before_run(run=built.run)
        build(built, self._sizes, self._facts)
        built.manager.on_durable(self._durable)
        built.manager.on_error(lambda step, error: built.hooks.on_checkpoint_error(run=built.run, step=step, error=error))
        resumed = self._request.resume and self._resume()
        if not resumed and self._recipe.train.init_from:
            self._initialise(self._recipe.train.init_from)
        built.random.restore(built.run.step)
        self._write_files()

    def _write_files(self) -> None:
        if self._built.events is None:
            return
        resolved, plugins = self._request.resolved, self._request.plugins
        for name, facts in ((RECIPE, resolved.recipe_json()), (RESOLVED, resolved.resolved_json()), (PLUGINS, plugins.facts())):
            self._directory.write(name, facts)

    def _initialise(self, source: str) -> None:
        """Begin with weights that are there already, instead of drawn ones."""
        built, weights = self._built, open_weights(source, self._request.plugins)
        ModelState(built.model, built.sharded, built.table).fill(weights)
        with contextlib.suppress(UsageError):  # weights that do not say which model they are of
            for difference in model_differences(self._recipe, weights.model, self._request.plugins):
                built.warn(f"The weights in {weights.location} come from another model: {difference}.")
        for remark in getattr(weights, "remarks", lambda recipe: ())(self._recipe):
            built.warn(remark)
        built.event("initialise", location=weights.location)

    def _resume(self) -> bool:
        """Load the newest checkpoint; False where the run was cut off before its first. One that was complete once and is damaged is no such case."""
        built, manager = self._built, self._built.manager
        latest = manager.latest()
        for skipped in manager.skipped:
            built.warn(f"Checkpoint {skipped.folder} is not used: {skipped.reason}")
        if latest is None:
            lost = [
                f"\n  {one.folder}: {one.reason}" for one in manager.skipped if f"{one.folder}/{MARKER}" in manager.storage.list(one.folder)
            ]
            if lost:
                raise CheckpointError(
                    f"Every checkpoint of {self._directory.path} is damaged. Restore its files, or begin a new run in another directory.{''.join(lost)}"
                )
            built.warn("There is no complete checkpoint to resume from: the run begins at step 0.")
            return False
        changes = compare_facts(load_manifest(manager.storage, latest.folder).facts, self._facts)
        for warning in check_changes(changes, self._request.allow_changes, latest.location):
            built.warn(warning)
        step = manager.load(latest, built.components)
        self._saved_step = self._durable_step = step
        if built.random.rederived:
            built.warn("The random generators were saved on another mesh: their state is derived anew from seed, rank and step.")
        built.event("resume", step=step, location=latest.location, changes=[dataclasses.asdict(change) for change in changes])
        if step >= self._recipe.train.steps:
            built.warn(
                f"The checkpoint is of step {step}, and train.steps is {self._recipe.train.steps}: nothing is trained, and only what ends a run is done, such as its "
                "evaluation. Raise train.steps to train on."
            )
        built.hooks.after_load(run=built.run, step=step, location=latest.location)
        return True

    # ------------------------------------------------------------ the loop

    def _flags(self) -> Flags:
        run = self._built.run
        try:
            self._built.manager.poll()
        except CheckpointError as error:
            self._failure = self._failure or error
        run.stop_reason = run.stop_reason or self._signals.asked()
        return Flags(run.stop_reason is not None, self._failure is not None)

    def _loop(self) -> bool:
        """Whether the ranks agreed to stop. A rank that is asked after the last step has nobody left to agree with, and finishes as all do."""
        built, run = self._built, self._built.run
        if run.step == 0 and self._recipe.evaluation.at_start:
            self._evaluate()
        while run.step < self._recipe.train.steps:
            try:
                with profiled(self._recipe.profile, run.step, run.rank, run.directory):
                    result = train_step(built, self._flags)
            except Exception as error:
                built.hooks.on_step_error(run=run, step=run.step, error=error)
                raise
            if result is None:
                built.warn(f"The data ended after step {run.step} of {self._recipe.train.steps}: the run ends here.")
                return False
            summary, flags = result
            if flags.failed:
                self._raise_failure()
            self._log(summary)
            self._spare_collector()
            built.hooks.after_step(run=run, summary=summary)
            self._warn_of_hooks()
            stop = flags.stop or (built.world.size == 1 and run.stop_reason is not None)
            if not stop and run.step < self._recipe.train.steps:
                self._periodic()
            if stop:
                run.stop_reason = next(reason for reason in built.world.gather_json(run.stop_reason, what="reason to stop") if reason)
                return True
        return False

    def _spare_collector(self) -> None:
        """After the first step: what imports, building and compiling left is not looked through again until the run ends. On one rank that takes most of a second, and all the others wait meanwhile."""
        # Whether anything is frozen does not tell: Python 3.12 starts with objects that are.
        if self._built.world.size > 1 and not self._has_frozen:
            gc.collect()
            gc.freeze()
            self._has_frozen = True

    def _periodic(self) -> None:
        step, checkpoint, evaluation = self._built.run.step, self._recipe.checkpoint.every, self._recipe.evaluation.every
        if checkpoint and step % checkpoint == 0:
            self._save()
        if evaluation and step % evaluation == 0:
            self._evaluate()

    def _save(self) -> None:
        """Save now. What fails here on one rank is raised on all at the next step, or at the end."""
        built, step = self._built, self._built.run.step
        if self._saved_step == step:
            return
        built.hooks.before_checkpoint(run=built.run, step=step)
        try:
            built.manager.save(step, built.components)
            self._saved_step = step
        except CheckpointError as error:
            self._failure = self._failure or error

    def _evaluate(self) -> None:
        built, step = self._built, self._built.run.step
        if built.evaluation is None or self._evaluated_step == step:
            return
        self._evaluated_step = step
        # A model may draw in evaluation as well; training goes on as if it had not, as it does when it is resumed from here.
        metrics, error, _ = undisturbed(evaluate, built)
        if error is not None:
            raise error
        if metrics:
            built.event("evaluation", step=step, **metrics)
            built.hooks.after_evaluation(run=built.run, step=step, metrics=metrics)

    def _log(self, summary: StepSummary) -> None:
        built = self._built
        self._window.append(summary)
        last = built.run.step == self._recipe.train.steps
        if built.run.step % max(1, self._recipe.train.log_every) and not last:
            return
        seconds = sum(each.seconds_s for each in self._window)
        rate = sum(each.tokens for each in self._window) / max(seconds, 1e-9)
        flops_per_s = rate * built.flops_per_token + sum(each.media_flops for each in self._window) / max(seconds, 1e-9)
        self._window = []
        peak = self._peak_flops and self._peak_flops * built.world.size
        built.event(
            "step",
            **(dataclasses.asdict(summary) | {"step": summary.step + 1}),
            tokens_total=self._built.progress.tokens,
            tokens_per_s=rate,
            mfu=flops_per_s / peak if peak else None,
            memory_bytes=devices.peak_memory(built.device),
        )

    def _durable(self, step: int, location: str) -> None:
        self._durable_step = step
        self._built.event("checkpoint", step=step, location=location)
        self._built.hooks.after_checkpoint(run=self._built.run, step=step, location=location)

    def _warn_of_hooks(self) -> None:
        for text in self._built.hooks.take_warnings():
            self._built.warn(text)

    # ------------------------------------------------------------ the end

    def _finish(self, stopped: bool) -> str:
        """Last checkpoint, last evaluation; returns the outcome."""
        built = self._built
        if self._recipe.checkpoint.every != 0:
            self._save()
        if not stopped:
            self._evaluate()
        failures = built.world.gather_json(str(self._failure) if self._failure else None, what="failed checkpoints")
        if any(failures):
            self._raise_failure(failures)
        built.manager.wait()
        return "stopped" if stopped else "done"

    def _raise_failure(self, failures: list[str | None] | None = None) -> None:
        failures = failures or self._built.world.gather_json(str(self._failure) if self._failure else None, what="failed checkpoints")
        if self._failure is not None:
            raise self._failure
        rank, text = next((rank, text) for rank, text in enumerate(failures) if text)
        raise CheckpointError(f"{text} (on rank {rank})")

    def _stopped_text(self) -> str:
        run = self._built.run
        how = f"resume it by `intarsia train --resume {self._directory.path}`"
        if self._recipe.checkpoint.every == 0:
            how = "no checkpoint was saved, since checkpoint.every is 0"
        return f"{run.stop_reason}: the run stopped after step {run.step} of {self._recipe.train.steps}; {how}."

    def _close_parts(self) -> None:
        """Threads end here; saves under way are finished where every rank is still there to do so."""
        if self._has_frozen:
            gc.unfreeze()
        built = self._built
        for loader in (getattr(built, "loader", None), built.evaluation):
            if loader is not None:
                loader.close()
        if hasattr(built, "manager"):
            try:
                built.manager.close(abandon=self._error is not None and built.world.size > 1)
            except IntarsiaError as error:
                if self._error is None or self._error["message"] != str(error):
                    logger.error("%s", error)


@contextlib.contextmanager
def profiled(config: ProfileConfig, step: int, rank: int, directory: Path) -> Iterator[None]:
    """A context for step `step` that writes `traces/step-STEP-rank-RANK.json` when the recipe asks for this step, and does nothing otherwise."""
    if step not in config.steps:
        yield
        return
    with torch.profiler.profile(profile_memory=config.memory, record_shapes=config.memory) as profiler:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(directory / "traces" / f"step-{step:06}-rank-{rank:04}.json"))
