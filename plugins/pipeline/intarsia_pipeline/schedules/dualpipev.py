"""DualPipeV. Torch-free."""

from __future__ import annotations

from intarsia_pipeline.actions import Action, restrict, v_shape
from intarsia_pipeline.config import DualPipeVConfig
from intarsia_pipeline.schedules.zero_bubble import Turns


class DualPipeV:
    """The V-shaped half of DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1; its V shape is described in DeepSeek's DualPipe repository and by Sea AI Lab, "Cut-in-half").

    S stages lie on R = S / 2 ranks. Forwards of one stage run beside backwards of the other, so that the messages of one hide behind the other's computation.
    Bubble (S / 2 - 1)(F&B + B - 3 W), where F&B is the time of such a pair, B that of a whole backward, W that of a weight backward, each of one stage (the
    table in that repository). At most S + 1 micro-batches' activations, each of one stage, are kept on a rank.
    """

    def __init__(self, config: DualPipeVConfig) -> None:
        pass

    def placement(self, ranks: int) -> tuple[int, ...]:
        """Down and up again."""
        return v_shape(ranks)

    def least(self, ranks: int) -> int:
        """As many as stages."""
        return 2 * ranks

    def plan(self, ranks: int, micro_batches: int) -> list[list[Action]]:
        """See `PipelineSchedule`."""
        planned = max(micro_batches, self.least(ranks))
        return restrict([self._rank(rank, ranks, planned) for rank in range(ranks)], micro_batches)

    def _rank(self, rank: int, ranks: int, micro_batches: int) -> list[Action]:
        turns = Turns((rank, 2 * ranks - 1 - rank))
        below = ranks - 1 - rank  # Ranks further down the V.
        # Fill: the first stage alone, then both.
        for _ in range(2 * below):
            turns.add("F", 0)
        for _ in range(rank + 1):
            turns.add("F", 0)
            turns.add("F", 1)
        # The first gradients come: their W fills the wait for the next.
        for _ in range(below):
            turns.add("IW", 1)
            turns.add("F", 1)
        # Steady: pairs, the first stage forward beside the second backward, and the reverse.
        for number in range(micro_batches - 2 * ranks + rank + 1):
            turns.add("F", 0)
            # On the last rank both stages are neighbours: its first pair would wait for itself to be over.
            turns.add("B", 1, beside=not (number == 0 and below == 0))
            turns.add("F", 1)
            turns.add("B", 0, beside=True)
        # Drain: no forwards of the first stage are left.
        for _ in range(below):
            turns.add("B", 1)
            turns.add("F", 1)
            turns.add("B", 0, beside=True)
        # Then none of the second; from the middle on W is put off, to fill the waits for the last gradients.
        for number in range(2 * (rank + 1)):
            turns.add("I" if number >= rank + 1 else "B", 1 - number % 2)
        for _ in range(below):
            self._oldest(turns)
            turns.add("I", 0)
        while turns.done["W", 0] < micro_batches or turns.done["W", 1] < micro_batches:
            self._oldest(turns)
        return turns.actions

    @staticmethod
    def _oldest(turns: Turns) -> None:
        """The W that has waited longest: the second stage's, as long as there is one."""
        turns.add("W", 1 if turns.done["W", 1] < turns.done["I", 1] else 0)
