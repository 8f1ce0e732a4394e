"""A sharded model under a schedule: which buckets a stage needs, when they come and go, when their gradients are summed. Torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intarsia.contracts import ShardedModel, StagePart
from torch import nn


class Driver:
    """Turns UNSHARD, RESHARD and REDUCE of stages into those of a sharder's buckets.

    A sharder takes part that has `drive("schedule")`, `unshard(name, wait)`, `reshard(name)`, `reduce(name)` and `accumulate(name)`, and whose `modules()` name each
    bucket's modules (FlexShard). Others act by themselves, and are told only which backward is the last.
    """

    def __init__(self, sharded: ShardedModel, model: nn.Module, stages: Sequence[StagePart]) -> None:
        self._sharded: Any = sharded
        self.is_driven = all(hasattr(sharded, name) for name in ("drive", "unshard", "reshard", "reduce", "accumulate"))
        self._stages = {part.index: part for part in stages}
        self._of: dict[int, list[str]] = {index: [] for index in self._stages}
        self._users: dict[str, set[int]] = {}
        self._whole: set[int] = set()
        self._reduced: set[int] = set()
        self._has_run = self._says_last = self._accumulates = False
        if self.is_driven:
            self._assign(model)

    def _assign(self, model: nn.Module) -> None:
        names = {id(module): name for name, module in model.named_modules()}
        for bucket, module in self._sharded.modules():
            users = self._users.setdefault(bucket, set())
            name = names.get(id(module), "")
            inside = {
                index for index, part in self._stages.items() if any(name == block or name.startswith(f"{block}.") for block in part.blocks)
            }
            users |= inside or {index for index, part in self._stages.items() if _is_of(name, part)}
        for bucket, users in self._users.items():
            for index in sorted(users):
                self._of[index].append(bucket)

    def begin(self, micro_batches: int, split: bool) -> None:
        """A step begins."""
        self._sharded.set_last_micro_batch(self.is_driven and micro_batches == 1)
        self._whole.clear()
        self._reduced.clear()
        # What acts by itself reduces as backward leaves it, when W may have yet to come: all of it is left to the end of the step then.
        self._says_last, self._accumulates = not split and not self.is_driven, micro_batches > 1
        if not self.is_driven:
            return
        self._sharded.drive("schedule")
        if not self._has_run:
            self._has_run = True
            # Held together once, buckets have memory that stays theirs before any graph refers to it.
            for act in (self.unshard, self.reshard):
                for stage in self._stages:
                    act(stage)

    def rest(self) -> None:
        """Outside of steps modules bring and give back what they need."""
        if self.is_driven:
            self._sharded.drive("hooks")

    def unshard(self, stage: int, wait: bool = False) -> None:
        """Begin to bring a stage's parameters; with `wait`, have them."""
        self._whole.add(stage)
        for bucket in self._of[stage]:
            self._sharded.unshard(bucket, wait)

    def reshard(self, stage: int) -> None:
        """Give back those buckets of a stage that no other stage keeps."""
        self._whole.discard(stage)
        for bucket in self._of[stage]:
            if not self._users[bucket] & self._whole:
                self._sharded.reshard(bucket)

    def before_backward(self, is_last: bool) -> None:
        """For sharders that act by themselves: whether this rank's next backward is its last of the step."""
        if self._says_last and is_last:
            self._sharded.set_last_micro_batch(True)

    def after_backward(self, stage: int) -> None:
        """A backward or its weights' part has left gradients."""
        if self._accumulates:
            for bucket in self._of[stage]:
                self._sharded.accumulate(bucket)

    def reduce(self, stage: int) -> None:
        """Sum a stage's gradients; a bucket of several stages with the last of them."""
        self._reduced.add(stage)
        for bucket in self._of[stage]:
            if self._users[bucket] <= self._reduced:
                self._sharded.reduce(bucket)


def _is_of(name: str, part: StagePart) -> bool:
    """Whether a stage needs what a module outside of blocks holds: what lies around one of its blocks, and the model itself; else a stage with an end of the model."""
    return name == "" or part.first or part.last or any(block.startswith(f"{name}.") for block in part.blocks)
