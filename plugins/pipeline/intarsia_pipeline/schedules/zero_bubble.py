"""Zero-bubble schedules: backward for the inputs (I) at once, for the weights (W) when there is nothing else to do. Torch-free.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241 (their B is I here).
"""

from __future__ import annotations

from intarsia_pipeline.actions import Action, loop, restrict, v_shape
from intarsia_pipeline.config import ZBH1Config, ZBVConfig


class ZBH1:
    """ZB-H1: 1F1B whose W fill the bubbles at its end. Bubble (R - 1)(F + I - W) where W is not longer than F and I (section 2.3, table 1), a third of 1F1B's where all three are
    equal; memory is 1F1B's of the first rank: R micro-batches.

    Rank r is r weight gradients behind: so many more activations as 1F1B lets it keep fewer.
    """

    def __init__(self, config: ZBH1Config) -> None:
        pass

    def placement(self, ranks: int) -> tuple[int, ...]:
        """One stage on each rank."""
        return loop(ranks, 1)

    def least(self, ranks: int) -> int:
        """As many as ranks."""
        return ranks

    def plan(self, ranks: int, micro_batches: int) -> list[list[Action]]:
        """See `PipelineSchedule`."""
        return [self._rank(rank, ranks, micro_batches) for rank in range(ranks)]

    def _rank(self, rank: int, ranks: int, micro_batches: int) -> list[Action]:
        ahead = min(ranks - 1 - rank, micro_batches)
        actions = [Action("F", rank, k) for k in range(ahead)]
        weights = 0
        for k in range(micro_batches):
            if ahead + k < micro_batches:
                actions.append(Action("F", rank, ahead + k))
            actions.append(Action("I", rank, k))
            if k - weights >= rank:
                actions.append(Action("W", rank, weights))
                weights += 1
        return actions + [Action("W", rank, k) for k in range(weights, micro_batches)]


class ZBV:
    """ZB-V: two stages on each rank, down and up again (section 6). No bubble within a rank's own time (first action to last) where F = I = W, with the memory of 1F1B:
    R micro-batches of both stages. Ranks begin and end one after the other: R - 1 forwards of one stage lie between the first and the last.

    Rank r: forwards of the first stage until the first micro-batch is back; both stages' forwards in turns; forward, I, W of the second; then a round of
    both, each with its W at once; at the end I alone for r rounds, and the W that were left.
    """

    def __init__(self, config: ZBVConfig) -> None:
        pass

    def placement(self, ranks: int) -> tuple[int, ...]:
        """Down and up again."""
        return v_shape(ranks)

    def least(self, ranks: int) -> int:
        """What the first rank puts in before anything comes back."""
        return 2 * ranks - 1

    def plan(self, ranks: int, micro_batches: int) -> list[list[Action]]:
        """See `PipelineSchedule`."""
        planned = max(micro_batches, self.least(ranks))
        return restrict([self._rank(rank, ranks, planned) for rank in range(ranks)], micro_batches)

    def _rank(self, rank: int, ranks: int, micro_batches: int) -> list[Action]:
        turns = Turns((rank, 2 * ranks - 1 - rank))
        for _ in range(2 * (ranks - rank) - 1):
            turns.add("F", 0)
        for _ in range(rank):
            turns.add("F", 1)
            turns.add("F", 0)
        for _ in range(ranks - rank):
            turns.add("FIW", 1)
        while turns.done["F", 1] < micro_batches:
            if turns.done["F", 0] < micro_batches:
                turns.add("F", 0)
            turns.add("IW", 0)
            turns.add("FIW", 1)
        for _ in range(rank):
            turns.add("I", 0)
            turns.add("I", 1)
        for _ in range(ranks - rank):
            turns.add("IW", 0)
        turns.finish(micro_batches)
        return turns.actions


class Turns:
    """A rank's actions in the making: each stage takes its micro-batches in order."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self._stages = stages
        self.actions: list[Action] = []
        self.done = {(kind, side): 0 for kind in "FBIW" for side in (0, 1)}

    def add(self, kinds: str, side: int, beside: bool = False) -> None:
        """The next micro-batch of the rank's first (0) or second (1) stage, once for each kind. A B counts as I and W."""
        for kind in kinds:
            counted = "IW" if kind == "B" else kind
            number = self.done[counted[0], side]
            self.actions.append(Action(kind, self._stages[side], number, beside))  # type: ignore[arg-type]
            for each in counted:
                self.done[each, side] += 1

    def finish(self, micro_batches: int) -> None:
        """All W that are left, the second stage's first: its I came first."""
        for side in (1, 0):
            while self.done["W", side] < micro_batches:
                self.add("W", side)
