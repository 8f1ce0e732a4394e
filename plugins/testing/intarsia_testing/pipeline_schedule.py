"""Conformance of pipeline schedules. Subclass, name your entry, run pytest; a failure says which promise is broken, in words.

    class TestMine(PipelineScheduleConformance):
        entry = "my-distribution:mine"

The promises are those of `intarsia_pipeline.actions.PipelineSchedule`. No torch is needed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from intarsia.errors import IntarsiaError
from intarsia.plugins import current
from intarsia_pipeline.actions import COMPUTE, PipelineSchedule
from intarsia_pipeline.build import Knobs, make, ready
from intarsia_pipeline.simulate import simulate

from intarsia_testing.base import Conformance, heavy
from intarsia_testing.promise import broken, keep


class PipelineScheduleConformance(Conformance):
    """Every promise of a pipeline schedule. `ranks` are the numbers of ranks with which it is tried."""

    kind = "pipeline schedule"
    ranks: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 8)

    def _made(self, config: Any) -> PipelineSchedule:
        made = current().build(config)
        keep(
            "contract",
            isinstance(made, PipelineSchedule),
            f"{type(made).__name__} must have placement(ranks), least(ranks) and plan(ranks, micro_batches).",
        )
        return made  # type: ignore[no-any-return]

    def _counts(self, made: PipelineSchedule, ranks: int) -> list[int]:
        least = made.least(ranks)
        return sorted({1, 2, max(1, least - 1), least, least + 1, 2 * least + 1, 3 * ranks})

    def test_light(self) -> None:
        """What it is built by needs no torch: `intarsia pipeline show` draws schedules at once."""
        if not self.entry:
            return
        module = self.found_entry().target.partition(":")[0]
        problem = heavy([module])
        keep("light target", not problem, f"importing {module} {problem}. A schedule is data and needs no torch.")

    def test_places_stages(self) -> None:
        """Every rank has equally many stages, whatever the number of ranks."""
        for config in self.given_configs():
            made = self._made(config)
            for ranks in self.ranks:
                placement = list(made.placement(ranks))
                counts = Counter(placement)
                keep(
                    "placement",
                    set(counts) == set(range(ranks)) and len(set(counts.values())) == 1,
                    f"on {ranks} ranks the stages lie on {placement[:24]}: every rank from 0 to {ranks - 1} must have equally many.",
                )

    def test_says_how_many_micro_batches_it_needs(self) -> None:
        """At least 1, and a whole number."""
        for config in self.given_configs():
            made = self._made(config)
            for ranks in self.ranks:
                least = made.least(ranks)
                keep(
                    "least",
                    isinstance(least, int) and least >= 1,
                    f"on {ranks} ranks it needs {least!r} micro-batches: a whole number from 1 on.",
                )

    def test_can_run(self) -> None:
        """Valid for any number of ranks and micro-batches, fewer than it needs included: complete, in order, without deadlock."""
        for config in self.given_configs():
            made = self._made(config)
            for ranks in self.ranks:
                for micro_batches in self._counts(made, ranks):
                    for knobs in (Knobs(), Knobs("action", 1, "each")):
                        try:
                            ready(config, ranks, micro_batches, knobs)
                        except IntarsiaError as error:
                            broken("valid", str(error))

    def test_is_a_function_of_the_sizes(self) -> None:
        """Asked twice, it answers alike: each rank makes the whole plan for itself."""
        for config in self.given_configs():
            for ranks in self.ranks:
                first, second = (make(config, ranks, 2 * ranks + 1) for _ in range(2))
                keep("pure", first == second, f"on {ranks} ranks two plans for {2 * ranks + 1} micro-batches differ.")

    def test_computes_only(self) -> None:
        """Either only what is computed is in the plan, or messages are whole too; a B never stands beside an I and a W of the same micro-batch."""
        for config in self.given_configs():
            schedule = make(config, max(self.ranks), 2 * max(self.ranks))
            kinds = {action.kind for actions in schedule.plan for action in actions}
            keep(
                "computes",
                {"F"} <= kinds and bool(kinds & {"B", "I"}),
                f"the plan has {', '.join(sorted(kinds))} only: forward and backward are missing.",
            )
            if not kinds <= COMPUTE:
                sends = sum(action.kind.startswith("SEND") for actions in schedule.plan for action in actions)
                receives = sum(action.kind.startswith("RECEIVE") for actions in schedule.plan for action in actions)
                keep("messages", sends == receives, f"the plan has {sends} sends and {receives} receives.")

    def test_more_micro_batches_idle_less(self) -> None:
        """The share of time in which ranks stand idle does not grow with the number of micro-batches."""
        for config in self.given_configs():
            made = self._made(config)
            for ranks in self.ranks:
                least = made.least(ranks)
                shares = [simulate(make(config, ranks, count)).idle_share for count in (least, 4 * least)]
                keep(
                    "idles less",
                    shares[1] <= shares[0] + 1e-9,
                    f"on {ranks} ranks it idles {shares[0]:.1%} with {least} micro-batches and {shares[1]:.1%} with {4 * least}.",
                )
