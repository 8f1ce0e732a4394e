"""GPipe, 1F1B and interleaved 1F1B. Torch-free."""

from __future__ import annotations

from intarsia.errors import UsageError

from intarsia_pipeline.actions import Action, loop, restrict
from intarsia_pipeline.config import GPipeConfig, InterleavedConfig, OneFOneBConfig


class GPipe:
    """All forwards, then all backwards (arXiv 1811.06965). Bubble (R - 1)(F + B) on R ranks; every rank keeps the activations of all micro-batches."""

    def __init__(self, config: GPipeConfig) -> None:
        pass

    def placement(self, ranks: int) -> tuple[int, ...]:
        """One stage on each rank."""
        return loop(ranks, 1)

    def least(self, ranks: int) -> int:
        """As many as ranks."""
        return ranks

    def plan(self, ranks: int, micro_batches: int) -> list[list[Action]]:
        """See `PipelineSchedule`."""
        numbers = range(micro_batches)
        return [[*(Action("F", rank, k) for k in numbers), *(Action("B", rank, k) for k in numbers)] for rank in range(ranks)]


class OneFOneB:
    """One forward, one backward (PipeDream-Flush, arXiv 2006.09503). Bubble (R - 1)(F + B); rank r keeps at most R - r micro-batches."""

    def __init__(self, config: OneFOneBConfig) -> None:
        pass

    def placement(self, ranks: int) -> tuple[int, ...]:
        """One stage on each rank."""
        return loop(ranks, 1)

    def least(self, ranks: int) -> int:
        """As many as ranks."""
        return ranks

    def plan(self, ranks: int, micro_batches: int) -> list[list[Action]]:
        """See `PipelineSchedule`."""
        return [
            alternate(_in_order("F", rank, micro_batches), _in_order("B", rank, micro_batches), ranks - 1 - rank) for rank in range(ranks)
        ]


class Interleaved:
    """1F1B over V stages on each rank (Megatron-LM, arXiv 2104.04473). Bubble (R - 1)(F + B) / V, F and B being those of all V stages of a rank.

    Micro-batches go round in groups of R. A last group that is not full leaves gaps.
    """

    def __init__(self, config: InterleavedConfig) -> None:
        self._virtual = config.virtual_stages
        if self._virtual < 1:
            raise UsageError(f"schedule.virtual_stages is {self._virtual}; a rank has at least 1 stage.")

    def placement(self, ranks: int) -> tuple[int, ...]:
        """Round and round."""
        return loop(ranks, self._virtual)

    def least(self, ranks: int) -> int:
        """One group."""
        return ranks

    def plan(self, ranks: int, micro_batches: int) -> list[list[Action]]:
        """See `PipelineSchedule`."""
        groups, virtual = -(-micro_batches // ranks), self._virtual
        plan = []
        for rank in range(ranks):
            turns = [(turn, group * ranks + k) for group in range(groups) for turn in range(virtual) for k in range(ranks)]
            forward = [Action("F", turn * ranks + rank, k) for turn, k in turns]
            backward = [Action("B", (virtual - 1 - turn) * ranks + rank, k) for turn, k in turns]
            # A micro-batch comes back to a rank after a whole round of its group; until the first has come back forwards go on.
            ahead = ranks - 1 - rank if virtual == 1 else 2 * (ranks - 1 - rank) + (virtual - 1) * ranks
            plan.append(alternate(forward, backward, ahead))
        return restrict(plan, micro_batches)


def _in_order(kind: str, stage: int, micro_batches: int) -> list[Action]:
    return [Action(kind, stage, k) for k in range(micro_batches)]  # type: ignore[arg-type]


def alternate(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then one forward and one backward in turns, then the backwards that are left."""
    ahead = min(ahead, len(forward))
    steady = len(forward) - ahead
    turns = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return [*forward[:ahead], *turns, *backward[steady:]]
