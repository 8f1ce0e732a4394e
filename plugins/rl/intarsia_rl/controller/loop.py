"""The controller's loop: begin groups where lag allows, finish them, give out what a step trains on.

Everything runs in one event loop; between two awaits nothing else happens, so that `state` is a consistent whole.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from intarsia.contracts import Task
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import DistributedError, IntarsiaError, PluginError, UsageError

from intarsia_rl.config import RolloutsConfig
from intarsia_rl.contracts import Algorithm, ProcessDied, Sample, WeightVersion
from intarsia_rl.controller import metrics
from intarsia_rl.controller.buffer import Block, Buffer, Group, lag_of
from intarsia_rl.controller.groups import Player, count_of, judge, score_segments, weight_of
from intarsia_rl.controller.protocols import Generators
from intarsia_rl.controller.rollout import POLICY, Try, all_of
from intarsia_rl.controller.seeds import task_index
from intarsia_rl.controller.state import group_from_json, group_to_json
from intarsia_rl.controller.writer import RolloutWriter
from intarsia_rl.processes.failures import words

logger = logging.getLogger("intarsia.rl")


@dataclasses.dataclass
class Parts:
    """What the loop works with. `reference` serves the run's initial weights, where the algorithm asks for them; `writer` None writes nothing."""

    player: Player
    held_out: Player
    algorithm: Algorithm
    tasks: Sequence[Task]
    held_out_tasks: Sequence[Task] = ()
    reference: Generators | None = None
    writer: RolloutWriter | None = None


class Loop:
    """Rollouts of one run. The trainer calls `begin`, then for each step `new_weights` and `batch`, between which `evaluate`; `state` at any time between them."""

    def __init__(self, config: RolloutsConfig, seed: int, parts: Parts):
        self._config, self._seed, self._parts = config, seed, parts
        self.generators = parts.player.generators
        self._buffer = Buffer(config.groups, config.max_lag, config.uses)
        self._version = -1
        self._newest: WeightVersion | None = None
        self._updating: asyncio.Task[None] | None = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._again: list[int] = []
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._idle: metrics.Idle | None = None
        self._settings = {
            "seed": seed, "group": config.group, "groups": config.groups, "uses": config.uses, "split": config.split,
            "tasks": digest(parts.tasks),
        }  # fmt: skip
        if not parts.tasks:
            raise UsageError(f"The environment has no task in its split {config.split!r}.")

    # ------------------------------------------------------------ beginning and ending

    async def begin(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Go on after `step` finished steps, from what `state` gave then (None: from the start). No group begins before the first weights are there."""
        if state:
            self._load(step, state)
        elif step:
            raise UsageError(f"The run goes on after step {step}, and the checkpoint says nothing of its rollouts.")
        if self._parts.writer is not None:
            self._parts.writer.resume(step)
        self._idle = metrics.Idle(asyncio.get_running_loop().time())

    def state(self) -> dict[str, Any]:
        """All that is needed to go on, as JSON with names that are the same whatever has happened: groups that are finished, those that were begun, and positions."""
        buffer = self._buffer
        groups = {f"group/{number}": group_to_json(group) for number, group in buffer.groups.items()}
        current = {f"current/{group.number}": group_to_json(group) for group in buffer.current} if self._config.uses > 1 else {}
        position = {"blocks": buffer.blocks, "following": buffer.following, "settings": self._settings}
        return {"position": position, **groups, **current}

    def _load(self, step: int, state: Mapping[str, Any]) -> None:
        position = state["position"]
        saved, now = position["settings"], self._settings
        changed = [f"  {name}: {saved.get(name)} when saved, {now[name]} now" for name in now if saved.get(name) != now[name]]
        if changed:
            text = "\n".join(changed)
            raise UsageError(f"The rollouts of the checkpoint cannot be taken up, since what they are made by has changed:\n{text}\nRestore it, or start a new run from the checkpoint's weights.")  # fmt: skip
        buffer = self._buffer
        buffer.blocks, buffer.following = position["blocks"], position["following"]
        if buffer.blocks != -(-step // buffer.uses):
            raise PluginError(f"The checkpoint of step {step} has given out {buffer.blocks} blocks of rollouts with uses={buffer.uses}.")
        found: dict[str, list[Group]] = {"group": [], "current": []}
        for key, value in state.items():
            kind, _, number = key.partition("/")
            if number:
                found[kind].append(group_from_json(int(number), value))
        buffer.groups = {group.number: group for group in sorted(found["group"], key=lambda group: group.number)}
        buffer.current = tuple(sorted(found["current"], key=lambda group: group.number))
        if again := buffer.rewind(step):
            logger.warning("%d groups of the checkpoint are begun again: with max_lag=%d they would be too old.", again, buffer.max_lag)
        self._again = [group.number for group in buffer.groups.values() if group.status == "unfinished"]

    async def close(self) -> None:
        """End what is running."""
        running = [*self._running.values(), *([self._updating] if self._updating else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # ------------------------------------------------------------ groups

    def _fill(self) -> None:
        """Begin what may begin. Groups of a run that is resumed were counted already."""
        if self._version < 0 or self._error is not None or self._barren():
            return
        while self._again:
            self._start(self._buffer.groups[self._again.pop(0)])
        for _ in range(self._buffer.room(self._version)):
            task = self._parts.tasks[task_index(self._seed, self._buffer.following, len(self._parts.tasks))]
            self._start(self._buffer.begin(task.id))

    def _start(self, group: Group) -> None:
        task = asyncio.ensure_future(self._play(group))
        self._running[group.number] = task
        task.add_done_callback(lambda done: self._ended(group.number, done))

    def _ended(self, number: int, done: asyncio.Task[None]) -> None:
        self._running.pop(number, None)
        if not done.cancelled() and (error := done.exception()) is not None:
            self._fail(error)
        self._fill()
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.set()

    async def _play(self, group: Group) -> None:
        parts, number = self._parts, group.number
        task = parts.tasks[task_index(self._seed, number, len(parts.tasks))]
        which = [Try(f"{number}/{member}", number, member, (self._seed, number, member)) for member in range(self._config.group)]
        samples = await parts.player.tries(task, which)
        status, advantages = judge(parts.algorithm, samples)
        if status == "kept" and parts.reference is not None:
            reference = parts.reference
            samples = await all_of(self._with_reference(reference, sample) for sample in samples)
        self._buffer.finish(number, status, samples, advantages)

    async def _with_reference(self, reference: Generators, sample: Sample) -> Sample:
        if sample.failure is not None:
            return sample
        scores, _ = await score_segments(reference, sample, f"reference/{sample.id}")
        return dataclasses.replace(sample, reference_log_probs=scores)

    # ------------------------------------------------------------ weights

    async def new_weights(self, weights: WeightVersion) -> None:
        """Begin to bring these weights to the generators; returns at once. Newer ones replace those that wait."""
        if self._newest is not None and weights.version < self._newest.version:
            raise UsageError(f"Weights of version {weights.version} come after those of version {self._newest.version}.")
        self._newest = weights
        self.generators.announce(weights)
        if self._updating is None or self._updating.done():
            self._updating = asyncio.ensure_future(self._update())

    async def _update(self) -> None:
        try:
            while self._newest is not None and self._newest.version > self._version:
                weights = self._newest
                try:
                    await self.generators.update(weights, cast(Literal["continue", "drain"], self._config.in_flight))
                except DistributedError:
                    # Transports keep few versions: one that is overwritten while it is read, or waited for, has been followed by others.
                    if self._newest is weights:
                        raise
                    continue
                self._version = weights.version
                self._fill()
                self._changed.set()
        except Exception as error:
            self._fail(error)

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Wait until something holds, and raise what ends the run."""
        while True:
            self._changed.clear()
            if self._error is not None:
                raise explained(self._error)
            if reached():
                return
            self._check_barren()
            await self._changed.wait()

    def _barren(self) -> tuple[Group, ...]:
        """The groups in a row that are too many to have nothing to train on; none where they are not."""
        groups = self._buffer.barren()
        return groups if len(groups) >= self._config.barren_rounds * self._config.groups else ()

    def _check_barren(self) -> None:
        config, groups = self._config, self._barren()
        if not groups:
            return
        failed = [sample.failure for group in groups for sample in group.samples if sample.failure is not None]
        rewards = [sample.reward for group in groups for sample in group.samples if sample.failure is None]
        said = f"{config.barren_rounds} rounds of {config.groups} groups in a row have nothing to train on (barren_rounds)"
        if failed and len(failed) >= len(rewards):
            (boundary, message), count = collections.Counter((failure.boundary, failure.message) for failure in failed).most_common(1)[0]
            raise PluginError(
                f"{said}: {len(failed)} of {len(failed) + len(rewards)} tries failed, {count} of them like this: {boundary}: {message}"
            )
        if not rewards:
            raise PluginError(f"{said}: no try gave a token or a reward.")
        if not any(sample.trained_tokens for group in groups for sample in group.samples):
            actors = sorted({segment.actor for group in groups for sample in group.samples for segment in sample.segments})
            raise PluginError(
                f"{said}: the actor {POLICY!r}, whose tokens are trained on, never spoke. The environment's observations name as next_actor: {', '.join(map(repr, actors))}."
            )
        low, high, mean = min(rewards), max(rewards), sum(rewards) / len(rewards)
        cut = sum(sample.truncated for group in groups for sample in group.samples)
        raise UsageError(
            f"{said}: the algorithm left every group out. Rewards are {low:g} to {high:g}, {mean:g} in the mean; of {len(failed) + len(rewards)} tries {len(failed)} failed, and a limit ended {cut}. Where all tries "
            "at a task earn the same there is nothing to learn: choose tasks that the policy solves sometimes, a larger `group`, or a reward with steps in between. Where limits end most of them "
            "(which `skip_truncated` leaves out), raise the environment's limits or train.sequence_length."
        )

    # ------------------------------------------------------------ what the trainer asks

    async def batch(self, step: int) -> dict[str, Any]:
        """What step `step` trains on: samples that did not fail with their advantages, weights and counts; `serving`, the version that all generators have; and numbers of
        the step."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        buffer, algorithm = self._buffer, self._parts.algorithm
        await self._until(lambda: buffer.ready(step))
        block = buffer.take(step)
        self._fill()
        self._check_lag(block, step)
        block = await self._audited(block, step)
        if self._parts.writer is not None and block.first:
            self._write(self._parts.writer, block, step)
        pairs = [pair for group in block.kept for pair in zip(group.samples, group.advantages, strict=True) if pair[0].failure is None]
        assert self._idle is not None
        self._idle.waited(loop.time() - begin)
        player = self._parts.player
        stats = {
            **metrics.of_block(block, step),
            **self._idle.take(loop.time(), await self.generators.totals(), self._config.generators),
            "buffered_groups": buffer.count("kept"),
            "unfinished_groups": buffer.count("unfinished"),
            "retries": player.retries,
            "kills": {"generators": self.generators.kills, "workers": player.workers.kills},
        }
        return {
            "samples": [sample for sample, _ in pairs],
            "advantages": [advantage for _, advantage in pairs],
            "weights": [weight_of(algorithm, sample) for sample, _ in pairs],
            "counts": [count_of(algorithm, sample) for sample, _ in pairs],
            "serving": self._version,
            "stats": stats,
        }

    def _check_lag(self, block: Block, step: int) -> None:
        for group in block.kept:
            for sample in group.samples:
                if sample.failure is None and not 0 <= lag_of(sample, step) <= self._config.max_lag:
                    raise PluginError(
                        f"Sample {sample.id} for step {step} has tokens of version {sample.oldest_version}, but max_lag is {self._config.max_lag}: a generator gives wrong versions, "
                        "or begins requests with weights older than those that it was told to take."
                    )

    async def _audited(self, block: Block, step: int) -> Block:
        """The block, some samples of which a generator has scored anew, where none has a token of the trainer's version."""
        if not self._config.audit or "forced" not in self.generators.facts.capabilities:
            return block
        samples = [sample for group in block.kept for sample in group.samples if sample.failure is None]
        if any(step in segment.versions for sample in samples for segment in sample.segments):
            return block
        await self._until(lambda: self._version >= step)
        chosen = samples[: self._config.audit]
        scored = await all_of(score_segments(self.generators, sample, f"audit/{step}/{sample.id}", replayed=True) for sample in chosen)
        by_id = {
            sample.id: dataclasses.replace(sample, audit_log_probs=scores, audit_version=step)
            for sample, (scores, versions) in zip(chosen, scored, strict=True)
            if versions == {step}
        }
        kept = tuple(
            dataclasses.replace(group, samples=tuple(by_id.get(sample.id, sample) for sample in group.samples)) for group in block.kept
        )
        return dataclasses.replace(block, kept=kept)

    def _write(self, writer: RolloutWriter, block: Block, step: int) -> None:
        groups = sorted((*block.kept, *block.left_out), key=lambda group: group.number)
        lines = [
            writer.line(sample, step=step + 1, status=group.status, advantage=advantage, lag=lag_of(sample, step))
            for group in groups
            for sample, advantage in zip(group.samples, group.advantages, strict=True)
        ]
        writer.write("step", step + 1, lines)

    async def evaluate(self, step: int) -> dict[str, Any]:
        """One try at each held-out task with the weights of version `step`: numbers, and the samples."""
        parts = self._parts
        await self._until(lambda: self._version >= step)
        which = [Try(f"held_out/{step}/{place}", -1, place, (self._seed, "held_out", place)) for place in range(len(parts.held_out_tasks))]
        calls = (parts.held_out.tries(task, [each]) for task, each in zip(parts.held_out_tasks, which, strict=True))
        samples = [sample for [sample] in await all_of(calls)]
        if parts.writer is not None:
            parts.writer.write("held_out", step, [parts.writer.line(sample, step=step, status="held_out") for sample in samples])
        live = [sample for sample in samples if sample.failure is None and sample.trained_tokens]
        return {
            "samples": live,
            "weights": [weight_of(parts.algorithm, sample) for sample in live],
            "counts": [count_of(parts.algorithm, sample) for sample in live],
            "stats": metrics.of_samples(samples),
        }


def digest(tasks: Sequence[Task]) -> str:
    """Equal where the tasks are, in this order."""
    content = hashlib.sha256()
    for task in tasks:
        content.update(json.dumps([task.id, task.data], sort_keys=True, default=str).encode())
    return f"{len(tasks)} {content.hexdigest()[:16]}"


def explained(error: BaseException) -> BaseException:
    """The error as the trainer is told it."""
    if isinstance(error, ProcessDied):
        return PluginError(f"A process of the rollouts has died and could not be replaced: {error}")
    if isinstance(error, EnvironmentFailure):
        return PluginError(
            f"The rollouts cannot go on. What failed is of the boundary `{error.boundary}`: {str(error).removeprefix(f'{error.boundary}: ')}"
        )
    return error if isinstance(error, IntarsiaError) else PluginError(f"The rollouts ended by {words(error)}")
