"""Parameters that several pipeline stages have: tied embeddings whose first and last use are stages apart. Their holders have equal shards of them, and one gradient.

Stages are at different places of a schedule, so nothing of this happens inside a backward pass: the gradients of such a parameter are reduced at the step's end, first
over the stage's ranks and then over its holders. The stages between take part with nothing to send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterInfo, ParameterTable
from torch import Tensor

from intarsia_flexshard.assign import unmatched
from intarsia_flexshard.config import FlexShardConfig


class Holders:
    """The stages that have one parameter, as a group to sum over: `size` of them, numbered as in the group of the pipeline."""

    def __init__(self, name: str, ranks: Sequence[int], pipeline: Communicator) -> None:
        self.name, self.ranks, self.size, self._pipeline = name, list(ranks), len(ranks), pipeline

    def all_reduce(self, tensor: Tensor, op: str = "sum", what: str = "") -> Tensor:
        """The sum in place, in the order of the stages: the same bits in all of them. `op` is sum. Every stage calls this or `join`."""
        pipeline = self._pipeline
        counts = [tensor.numel() * (rank in self.ranks and rank != pipeline.rank) for rank in range(pipeline.size)]
        sends = [tensor if count else tensor[:0] for count in counts]
        received = pipeline.exchange(sends, counts, f"sum {self.name} over stages")
        received[pipeline.rank] = tensor
        first, *others = (received[rank] for rank in self.ranks)
        total = first.clone()
        for part in others:
            total += part
        return tensor.copy_(total)

    def join(self, like: Tensor) -> None:
        """Take part in the sum of others; `like` is any tensor of the gradients' dtype on the group's device."""
        nothing = [like.new_empty(0)] * self._pipeline.size
        self._pipeline.exchange(nothing, [0] * self._pipeline.size, f"sum {self.name} over stages")


class Copies:
    """All such parameters of a pipeline, trained ones only, in an order that is the same in all stages; `stage` are this stage's ranks. A collective of the pipeline where
    there is one."""

    def __init__(self, infos: Iterable[ParameterInfo], mesh: Mesh) -> None:
        self.stage = mesh.stage
        self.holders: dict[str, Holders] = {}
        if mesh.sizes["pp"] == 1:
            return
        self._pipeline = mesh.comm("pp")
        mine = sorted(info.name for info in infos if info.absent and info.trainable)
        everywhere = self._pipeline.gather_json(mine, "tied parameters of several stages")
        for name in sorted({name for names in everywhere for name in names}):
            ranks = [rank for rank, names in enumerate(everywhere) if name in names]
            self.holders[name] = Holders(name, ranks, self._pipeline)

    def agree(self, facts: dict[str, Any]) -> None:
        """Compare what holders say of their parameters (`facts` by name). Raises DistributedError, on every stage, where two differ."""
        if not self.holders:
            return
        everywhere = self._pipeline.gather_json(facts, "tied parameters of several stages")
        first = {name: stage[name] for stage in reversed(everywhere) for name in stage}
        # Stages that have none of them say what the others do.
        self._pipeline.agree(
            first | facts, "parameters that several pipeline stages have (their buckets must have one placement, axes and dtypes)"
        )

    def nothing(self, dtype: torch.dtype) -> Tensor:
        """A tensor without elements that the pipeline's group can send."""
        return torch.empty(0, dtype=dtype, device=self._pipeline.device)


def matched_elsewhere(config: FlexShardConfig, table: ParameterTable, mesh: Mesh) -> list[str]:
    """The buckets' globs that match in another pipeline stage, though not in this one."""
    if mesh.sizes["pp"] == 1 or not config.buckets:
        return []
    missing = unmatched(config, table.values())
    everywhere = mesh.comm("pp").gather_json(missing, "buckets of other stages")
    return [glob for glob in missing if not all(glob in stage for stage in everywhere)]
