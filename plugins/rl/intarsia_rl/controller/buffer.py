"""Which groups may begin, and which of them a step trains on: the arithmetic of lag, exact and without a clock.

Groups are numbered as they begin. A block is the next `size` kept groups in that order, and step `s` trains on block `s // uses`. A slow group is waited for, so that no task is
trained on less often for taking long. With V the newest version that all generators serve, a group may begin only while the groups that were trained on, those that are kept and
those that are unfinished are together fewer than (V + max_lag + 1) // uses * size. Groups that are left out make room. So the k-th kept group, whose tokens are of version V or later,
is last trained on by step (k // size) * uses + uses - 1 <= V + max_lag.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from intarsia.errors import PluginError, UsageError

from intarsia_rl.contracts import Sample

Status = Literal["unfinished", "kept", "filtered", "failed"]


@dataclasses.dataclass
class Group:
    """Tries at one task. `advantages` has one number for each sample, 0 for those that failed. `status`: `filtered` by the algorithm, `failed` where no sample can be trained on."""

    number: int
    task: str
    status: Status = "unfinished"
    samples: tuple[Sample, ...] = ()
    advantages: tuple[float, ...] = ()

    @property
    def left_out(self) -> bool:
        """Whether it is finished and not trained on."""
        return self.status in ("filtered", "failed")


@dataclasses.dataclass(frozen=True)
class Block:
    """What a step trains on (`kept`), and the groups before its last one that are not trained on. `first`: this is its first use."""

    kept: tuple[Group, ...]
    left_out: tuple[Group, ...]
    first: bool


class Buffer:
    """The groups that were begun and not yet trained on, by number. `blocks` counts those given out; `following` is the next group's number."""

    def __init__(self, size: int, max_lag: int, uses: int = 1):
        if min(size, uses) < 1 or max_lag < 0:
            raise UsageError(f"groups={size} and uses={uses} must be at least 1 and max_lag={max_lag} at least 0.")
        if max_lag < uses - 1:
            raise UsageError(
                f"uses={uses} trains on a group in {uses} steps in a row, the last of which is {uses - 1} steps behind its tokens at least; max_lag={max_lag} allows "
                f"less. Set max_lag to {uses - 1} or more, or uses to at most {max_lag + 1}."
            )
        self.size, self.max_lag, self.uses = size, max_lag, uses
        self.blocks = self.following = 0
        self.groups: dict[int, Group] = {}
        self.current: tuple[Group, ...] = ()

    # ------------------------------------------------------------ beginning

    def room(self, version: int) -> int:
        """How many groups may begin now that every generator serves `version`."""
        taken = self.blocks * self.size + sum(not group.left_out for group in self.groups.values())
        return max(0, (version + self.max_lag + 1) // self.uses * self.size - taken)

    def begin(self, task: str) -> Group:
        """The next group."""
        group = self.groups[self.following] = Group(self.following, task)
        self.following += 1
        return group

    def finish(self, number: int, status: Status, samples: Sequence[Sample], advantages: Sequence[float]) -> None:
        """An unfinished group has ended."""
        group = self.groups[number]
        if group.status != "unfinished" or status == "unfinished":
            raise AssertionError(f"group {number} is {group.status} and cannot become {status}")
        group.status, group.samples, group.advantages = status, tuple(samples), tuple(advantages)

    def rewind(self, step: int) -> int:
        """Forget groups, from the first one on that would be trained on too late for this `max_lag` in a run that goes on after `step` steps; they begin again when there is room, with
        their numbers and so their seeds. Returns how many. UsageError where the block that is in use is too old already."""
        used = self._last_use(self.blocks * self.size - 1)
        if self._again(step) and (late := [group for group in self.current if _oldest(group, step) < used - self.max_lag]):
            raise UsageError(
                f"The rollouts that are in use (uses={self.uses}) when the checkpoint was saved are of version {min(_oldest(group, step) for group in late)}, which is too old for "
                f"step {used} with max_lag={self.max_lag}. Resume with the max_lag that the run had."
            )
        trained = self.blocks * self.size
        for group in list(self.groups.values()):
            if group.left_out:
                continue
            if _oldest(group, step) < self._last_use(trained) - self.max_lag:
                gone = [number for number in self.groups if number >= group.number]
                for number in gone:
                    del self.groups[number]
                self.following = group.number
                return len(gone)
            trained += 1
        return 0

    def _last_use(self, place: int) -> int:
        """The last step that trains on the kept group of this place."""
        return place // self.size * self.uses + self.uses - 1

    # ------------------------------------------------------------ giving out

    def finished(self) -> Iterator[Group]:
        """Groups by number, up to the first one that is unfinished."""
        return itertools.takewhile(lambda group: group.status != "unfinished", self.groups.values())

    def _again(self, step: int) -> bool:
        return self.blocks > 0 and step // self.uses == self.blocks - 1

    def ready(self, step: int) -> bool:
        """Whether `take(step)` can be answered."""
        return self._again(step) or sum(group.status == "kept" for group in self.finished()) >= self.size

    def take(self, step: int) -> Block:
        """The block of a step. Asked for the same step again, or for the next use of its block, it gives the same groups."""
        if self._again(step):
            return Block(self.current, (), False)
        if step // self.uses != self.blocks:
            raise PluginError(f"Step {step} asks for block {step // self.uses} of rollouts, and the next one is {self.blocks}.")
        kept: list[Group] = []
        left_out: list[Group] = []
        for group in list(self.finished()):
            (left_out if group.left_out else kept).append(group)
            del self.groups[group.number]
            if len(kept) == self.size:
                break
        else:
            raise AssertionError(f"block {self.blocks} is not ready")
        self.current, self.blocks = tuple(kept), self.blocks + 1
        return Block(self.current, tuple(left_out), True)

    def barren(self) -> tuple[Group, ...]:
        """The longest row of groups that are left out one after the other, nothing unfinished before them."""
        longest: tuple[Group, ...] = ()
        for left_out, run in itertools.groupby(self.finished(), key=lambda group: group.left_out):
            groups = tuple(run)
            if left_out and len(groups) > len(longest):
                longest = groups
        return longest

    def count(self, status: Status) -> int:
        """How many groups are so."""
        return sum(group.status == status for group in self.groups.values())


def lag_of(sample: Sample, step: int) -> int:
    """Optimizer steps between the oldest token and the step that trains on it."""
    oldest = sample.oldest_version
    return 0 if oldest is None else step - oldest


def _oldest(group: Group, step: int) -> int:
    """The oldest version of its tokens; of a group that begins again, the version `step` at which it does."""
    return min(
        (oldest for sample in group.samples if sample.failure is None and (oldest := sample.oldest_version) is not None), default=step
    )
