"""The most memory that a rank has at once, from what FlexShard holds, what blocks keep, and what passes take for a while. Pure integers, torch-free.

Nothing of a step's gradients is there yet when activations are at their most, but for what earlier micro-batches have left: whole, in the reduction dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from intarsia_planner.stage import TracedStage


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes on one rank. `parameters` are masters and their copies in the compute dtype, shards and whole ones; `gradients` are the masters'; `accumulated` whole ones of earlier micro-batches; `buffers` packed gradients and
    what arrives of others'; `activations` what waits for backward of all micro-batches in flight; `transient` the most that a pass has beyond it; `peak` the most of all at once; `host` is in the host's memory."""

    parameters: int
    gradients: int
    optimizer: int | None
    accumulated: int
    buffers: int
    activations: int
    transient: int
    peak: int
    moment: str
    host: int = 0


def held(
    ranks: Sequence[Any], stages: Sequence[TracedStage], live: Mapping[int, int], whole: int | None, micro_batches: int, workspace: int
) -> Held:
    """`ranks` are FlexShard's figures of the rank that has most; `live[stage]` how many micro-batches of a stage are in flight at most; `whole` what whole parameters take where a schedule
    keeps them (None: rings); `workspace` what libraries allocate for themselves."""
    rank = max(ranks, key=lambda each: each.device)
    parameters = rank.masters - rank.away + rank.cast + (rank.whole if whole is None else whole)
    base = parameters + (rank.optimizer or 0) + rank.pack + workspace
    waiting = rank.accumulated if rank.accumulated else 0
    is_sharded = micro_batches > 1 and not rank.accumulated
    base_gradients = rank.gradients if is_sharded else 0
    activations = sum(stage.kept * live[stage.index] for stage in stages)
    transient, moment = max((_transient(stage) for stage in stages), default=(0, ""))
    fullest = base + waiting + base_gradients + activations + transient
    # At the end all gradients are there, and one bucket's on their way.
    ended = base + rank.gradients + rank.away
    peak, moment = max((fullest, moment), (ended, "the update"))
    return Held(
        parameters=parameters,
        gradients=rank.gradients,
        optimizer=rank.optimizer,
        accumulated=rank.accumulated,
        buffers=rank.pack,
        activations=activations,
        transient=transient,
        peak=peak,
        moment=moment,
        host=rank.host,
    )


def _transient(stage: TracedStage) -> tuple[int, str]:
    """The most that one pass has beyond what waits, and where."""
    found = [(0, "")]
    head = 0
    for piece in stage.pieces:
        memory = piece.traced.memory
        if piece.kind == "leave":
            # The head's gradient waits for the end of backward, since the model drives its parameters.
            head = memory.gradients
            found.append((max(memory.forward, memory.kept + memory.backward), "the loss"))
    # What has come from a neighbour, and what is on its way to one.
    passed = sum(stage.carried)
    for piece in stage.pieces:
        memory = piece.traced.memory
        if piece.kind == "block":
            found.append((memory.backward + head + passed, f"backward of {piece.name}"))
    return max(found)
