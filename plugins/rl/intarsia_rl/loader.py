"""The loader `rollouts`: every rank's micro-batches of each step, from samples that a controller process makes with the weights that the trainer publishes.

A step, on every rank: publish the weights (a collective), let rank 0 tell the controller and ask it for the step's samples, share them, pack alike and take this rank's rows. What goes wrong
on rank 0 is raised on every rank. Nothing is started before the first step, so that a run that is resumed begins with its state.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from intarsia import errors
from intarsia.comm import Communicator
from intarsia.config import Recipe
from intarsia.contracts import Batch, Run, StateItem, Tokenizer
from intarsia.errors import CheckpointError, DistributedError, IntarsiaError, UsageError
from intarsia.plugins import current

from intarsia_rl.algorithms.config import check_routes
from intarsia_rl.config import RolloutsConfig, SamplingConfig
from intarsia_rl.contracts import ProcessDied, WeightTransport
from intarsia_rl.controller.service import SERVICE
from intarsia_rl.controller.state import sample_from_json, sample_to_json
from intarsia_rl.media import decoder_of, processor_of
from intarsia_rl.packing import Packing, Weighed, micro_batches
from intarsia_rl.processes.pages import pages
from intarsia_rl.processes.plain import plain_recipe
from intarsia_rl.processes.sync import BlockingProcess

NAME = "rollouts"


def build(
    config: RolloutsConfig, recipe: Recipe, plugins: Any, rank: int, ranks: int, directory: Path, split: str
) -> RolloutsLoader | HeldOutLoader:
    """The entry's target: for split "train" the rollouts, for "evaluation" what evaluates the policy on held-out tasks."""
    place = (str(directory), rank)
    if split == "evaluation":
        return HeldOutLoader(_LOADERS[place])
    loader = _LOADERS[place] = RolloutsLoader(config, recipe, plugins, rank, ranks, directory)
    return loader


_LOADERS: weakref.WeakValueDictionary[tuple[str, int], RolloutsLoader] = weakref.WeakValueDictionary()
"""By run directory and rank: evaluation goes through the controller of the same run's training loader."""


class RolloutsLoader:
    """See the module and `intarsia.contracts.Loader`."""

    total: int | None = None

    def __init__(self, config: RolloutsConfig, recipe: Recipe, plugins: Any, rank: int, ranks: int, directory: Path):
        check_settings(config, recipe)
        self.tokenizer: Tokenizer = plugins.build(recipe.data.tokenizer)
        self.samples = self.steps = 0
        self.stats: dict[str, Any] = {}
        self._config, self._recipe, self._plugins = config, recipe, plugins
        self._rank, self._ranks, self._directory = rank, ranks, Path(directory)
        self._run: Run | None = None
        self._world: Communicator
        self._transport: WeightTransport
        self._controller: BlockingProcess | None = None
        self._state: dict[str, Any] = {}
        self._begun = False
        self._published: list[int] = []
        self._held_out: tuple[int, list[Batch]] | None = None
        algorithm = plugins.build(recipe.loss.algorithm)  # type: ignore[attr-defined]
        pad = next((number for number in (self.tokenizer.pad_id, self.tokenizer.eos_id) if number is not None), 0)
        needs, decoder = bool(algorithm.needs_reference), decoder_of(processor_of(recipe.data, recipe.model, plugins))
        self._packing = Packing(recipe.train.sequence_length, recipe.train.micro_batch, pad, needs, config.replay_routes, decoder)

    def attach(self, run: Run) -> None:
        """Take the parts of the run, and begin to start the controller. Every rank."""
        self._run, self._world = run, run.parts["mesh"].world
        self._transport = self._plugins.build(self._config.weights, self._directory)
        self._on_first(self._start)

    # ------------------------------------------------------------ steps

    def next_step(self) -> list[Batch]:
        """See Loader. Errors, on every rank: what ends the rollouts (nothing to learn from, generators that are lost), as the controller says it."""
        run = self._attached()
        step = run.step
        self._publish(step)
        held_out = self._config.held_out
        due = held_out.at_start if step == 0 else bool(held_out.every) and step % (held_out.every or 1) == 0
        if due and held_out.every != 0:
            self.evaluate()
        begin = time.perf_counter()
        found = self._ask("batch", step)
        for version in [version for version in self._published if version < found["serving"]]:
            self._transport.retire(version)
            self._published.remove(version)
        self.stats = {**found["stats"], "wait_s": time.perf_counter() - begin, "advantages": found["advantages"]}
        samples = weighed(found)
        self.samples, self.steps = self.samples + len(samples), step + 1
        return micro_batches(samples, self._packing, self._rank, self._ranks, step)

    def evaluate(self) -> list[Batch]:
        """Try the held-out tasks with the weights of now, once for each version, and record the event `held_out`. Its samples as batches, whose advantages are their rewards."""
        run = self._attached()
        step = run.step
        self._publish(step)
        if self._held_out is None or self._held_out[0] != step:
            found = self._ask("evaluate", step)
            run.record("held_out", step=step, **found["stats"])
            samples = weighed({**found, "advantages": [sample.reward for sample in found["samples"]]})
            self._held_out = step, micro_batches(samples, self._packing, self._rank, self._ranks, step)
        return list(self._held_out[1])

    def _publish(self, step: int) -> None:
        """Make the weights of now readable, and tell the controller; once for each version. A collective."""
        if step in self._published:
            return
        weights = self._transport.publish(step, self._attached().parts)
        self._published.append(step)
        self._on_first(lambda: self._tell(step, weights))
        self._begun, self._state = True, {}  # on every rank: from now on the controller has it

    def _tell(self, step: int, weights: Any) -> None:
        if not self._begun:
            for page in pages(list(self._state.items())):
                self._call("take_up", page)
            facts = self._call("begin", step)
            self._attached().record("generators", count=self._config.generators, **facts)
            if said := other_policy(self._config.sampling):
                self._attached().record("warning", message=said)
        self._call("new_weights", weights)

    # ------------------------------------------------------------ the controller

    def _start(self) -> None:
        recipe = plain_recipe(self._recipe, self._plugins)
        launcher = self._plugins.build(self._config.launcher)
        self._controller = BlockingProcess.start(
            launcher, "controller", SERVICE, {"recipe": recipe, "directory": str(self._directory.absolute())}, 1
        )

    def _call(self, method: str, *arguments: Any) -> Any:
        """Ask the controller. Rank 0."""
        if self._controller is None:
            raise DistributedError("The controller of the rollouts is not running (any more).")
        try:
            return self._controller.call(method, *arguments)
        except ProcessDied as error:
            raise DistributedError(
                f"The controller of the rollouts is gone: {error.reason}. Resume the run from its last checkpoint; nothing that was trained on is lost."
            ) from error

    def _ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """The controller's answer, on every rank; a collective for each page of its samples. `samples` are the contract's."""
        answer = self._shared(method, lambda: self._call(method, *arguments))
        while page := self._shared(method, lambda: {"samples": self._call("more")})["samples"]:
            answer["samples"] += page
        return answer

    def _shared(self, method: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a call gives on rank 0, on every rank. A collective."""
        answer: dict[str, Any] = {}
        self._on_first(lambda: answer.update(call()))
        if self._world.size > 1:
            first = self._world.rank == 0
            sent = {**answer, "samples": [sample_to_json(sample) for sample in answer["samples"]]} if first else None
            received = self._world.broadcast_json(sent, what=f"rollouts ({method})")
            if not first:
                answer = {**received, "samples": [sample_from_json(value) for value in received["samples"]]}
        return answer

    def _on_first(self, act: Callable[[], None]) -> None:
        """Do something on rank 0 of the world; its IntarsiaError is raised on every rank. A collective."""
        failure: list[str] | None = None
        error: BaseException | None = None
        if self._world.rank == 0:
            try:
                act()
            except IntarsiaError as raised:
                error, failure = raised, [type(raised).__name__, str(raised)]
            except Exception as raised:
                error, failure = raised, ["DistributedError", f"rank 0: {type(raised).__name__}: {raised}"]
        if self._world.size > 1:
            failure = self._world.broadcast_json(failure, what="state of the rollouts")
        if error is not None:
            raise error
        if failure is not None:
            raise getattr(errors, failure[0], DistributedError)(failure[1])

    def _attached(self) -> Run:
        if self._run is None:
            raise UsageError("The loader `rollouts` works within a run only: it needs the model whose weights it publishes.")
        return self._run

    # ------------------------------------------------------------ position

    def state(self) -> list[StateItem]:
        """One keyed item, which rank 0 gives: the controller's state, and how much was given out."""
        value: dict[str, Any] = dict(self._state)
        if self._begun and self._world.rank == 0:
            items = self._call("state")["items"]
            while page := self._call("more"):
                items += page
            value = dict(items)
        if value or self._run is None or self._world.rank == 0:
            value["given"] = {"samples": self.samples, "steps": self.steps}
        return [StateItem("data", NAME, "keyed", value)]

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """Go on after the saved position; the controller gets its part when it begins."""
        if NAME not in values:
            raise CheckpointError(
                f"data/{NAME} is missing from the checkpoint: it is not known which rollouts were trained on. Start a new run from its weights."
            )
        value = dict(values[NAME])
        given = value.pop("given")
        if self._begun:
            raise UsageError("The loader `rollouts` takes up a position before its first step only.")
        self.samples, self.steps, self._state = given["samples"], given["steps"], value

    def reset(self, samples: int = 0, steps: int = 0) -> None:
        """Only to where it is: rollouts are not repeated."""
        if (samples, steps) != (self.samples, self.steps):
            raise UsageError(
                "Rollouts cannot be gone back to: they were made by weights that are no more. Resume a checkpoint, or start a new run."
            )

    def facts(self) -> dict[str, Any]:
        """What the recipe says of them."""
        config, entry = self._config, self._plugins.entry_of(self._config.environment)
        return {
            "environment": entry.full_name,
            "split": config.split,
            "group": config.group,
            "groups": config.groups,
            "max_lag": config.max_lag,
        }

    def close(self) -> None:
        """End the controller and all that it started, and remove the published weights. May be called twice."""
        controller, self._controller = self._controller, None
        if controller is not None:
            controller.stop(30.0)
        if hasattr(self, "_transport"):
            self._transport.close()
            del self._transport


class HeldOutLoader:
    """Core's evaluation, as far as it is due (after the last step it always is, unless evaluation.every is 0): held-out tasks, tried with the weights of now. The loss that it gives is that of samples whose advantages
    are their rewards: minus the mean reward, where the algorithm weighs samples alike."""

    total: int | None = None

    def __init__(self, loader: RolloutsLoader):
        self._loader = loader
        self.tokenizer = loader.tokenizer
        self.samples = self.steps = 0
        self._done = False

    def next_step(self) -> list[Batch] | None:
        """One step, of all held-out tasks."""
        if self._done:
            return None
        self._done = True
        return self._loader.evaluate()

    def reset(self, samples: int = 0, steps: int = 0) -> None:
        """Begin again."""
        self._done = False

    def facts(self) -> dict[str, Any]:
        """How many tasks, of which split."""
        held_out = self._loader._config.held_out
        return {"split": held_out.split, "tasks": held_out.tasks}

    def close(self) -> None:
        """Nothing: the training loader has the processes."""

    def state(self) -> list[StateItem]:
        """None."""
        return []

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """None."""


def weighed(found: Mapping[str, Any]) -> list[Weighed]:
    """The controller's lists side by side."""
    return [Weighed(*each) for each in zip(found["samples"], found["advantages"], found["weights"], found["counts"], strict=True)]


def check_settings(config: RolloutsConfig, recipe: Recipe) -> None:
    """Refuse settings that cannot be right, all at once. Raises UsageError."""
    from intarsia_rl.controller.buffer import Buffer

    if not hasattr(recipe.loss, "algorithm"):
        raise UsageError(
            f"data.loader=rollouts learns by loss=policy and an algorithm (loss.algorithm=grpo), and the loss is `{current().entry_of(recipe.loss).name}`."
        )
    Buffer(config.groups, config.max_lag, config.uses)
    wrong = wrong_numbers(config)
    if config.in_flight not in ("continue", "drain"):
        hint = errors.did_you_mean(config.in_flight, ("continue", "drain")).rstrip(".")
        wrong.append(f"in_flight={config.in_flight!r} is unknown. {hint}")
    if wrong:
        text = "; ".join(wrong)
        raise UsageError(f"data.loader: {text}{'' if text.endswith('?') else '.'}")
    if config.replay_routes:
        check_routes(recipe.model)


def other_policy(sampling: SamplingConfig) -> str:
    """Words for settings by which tokens are drawn from another distribution than the policy's; none where it is the policy's own."""
    own = SamplingConfig()
    found = [
        f"{name}={getattr(sampling, name)}"
        for name in ("temperature", "top_k", "top_p", "min_p")
        if getattr(sampling, name) != getattr(own, name)
    ]
    if not found:
        return ""
    return (
        f"data.loader.sampling has {', '.join(found)}: tokens are drawn from another distribution than the policy, whose log-probabilities (temperature 1, nothing left out) the loss compares. What "
        "it learns is biased by the difference."
    )


def wrong_numbers(config: RolloutsConfig) -> list[str]:
    """Numbers that mean nothing, said so; one that is not a number is none that is right."""
    sampling, held_out = config.sampling, config.held_out
    least_one = {name: getattr(config, name) for name in ("group", "generators", "workers", "attempts", "barren_rounds")}
    least_one |= {"generator_threads": config.generator_threads, "sampling.top_k": sampling.top_k}
    least_none = {"audit": config.audit, "held_out.tasks": held_out.tasks, "held_out.every": held_out.every}
    temperatures = {"sampling.temperature": sampling.temperature, "held_out.temperature": held_out.temperature}
    wrong = [f"{name}={value} must be at least 1" for name, value in least_one.items() if value is not None and value < 1]
    wrong += [f"{name}={value} must be at least 0" for name, value in least_none.items() if value is not None and value < 0]
    wrong += [
        f"{name}={value} must be a number from 0 on (0 is greedy)" for name, value in temperatures.items() if not 0 <= value < float("inf")
    ]
    if not 0 < config.timeout_s < float("inf"):
        wrong.append(f"timeout_s={config.timeout_s} must be a number of seconds above 0")
    if not 0 < sampling.top_p <= 1:
        wrong.append(f"sampling.top_p={sampling.top_p} must be above 0 and at most 1")
    if not 0 <= sampling.min_p <= 1:
        wrong.append(f"sampling.min_p={sampling.min_p} must be from 0 to 1")
    return wrong
