"""The conformance kit on this repository's pipeline schedules, and on ones that break promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from intarsia_pipeline.actions import Action
from intarsia_pipeline.config import InterleavedConfig, OneFOneBConfig
from intarsia_pipeline.schedules.plain import OneFOneB
from intarsia_testing import PipelineScheduleConformance


class TestGPipe(PipelineScheduleConformance):
    entry = "intarsia-pipeline:gpipe"


class Test1F1B(PipelineScheduleConformance):
    entry = "intarsia-pipeline:1f1b"


class TestInterleaved(PipelineScheduleConformance):
    entry = "intarsia-pipeline:interleaved"
    configs = (InterleavedConfig(), InterleavedConfig(virtual_stages=3))
    ranks = (1, 2, 4)


class TestZBH1(PipelineScheduleConformance):
    entry = "intarsia-pipeline:zb_h1"


class TestZBV(PipelineScheduleConformance):
    entry = "intarsia-pipeline:zbv"


class TestDualPipeV(PipelineScheduleConformance):
    entry = "intarsia-pipeline:dualpipev"


class Broken(OneFOneB):
    """1F1B with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__(OneFOneBConfig())
        self._fault, self._asked = fault, 0

    def placement(self, ranks: int) -> tuple[int, ...]:
        return (*super().placement(ranks), 0) if self._fault == "placement" and ranks > 1 else super().placement(ranks)

    def least(self, ranks: int) -> int:
        return 0 if self._fault == "least" else super().least(ranks)

    def plan(self, ranks: int, micro_batches: int) -> Sequence[list[Action]]:
        plan = super().plan(ranks, micro_batches)
        self._asked += 1
        if self._fault == "missing":
            plan[-1].pop()
        if self._fault == "order":
            plan[0].insert(0, plan[0].pop())
        if self._fault == "moody" and self._asked % 2:
            plan[0] = [*sorted(plan[0], key=lambda action: action.kind != "F")]
        return plan


@pytest.mark.parametrize(
    "fault, test, told",
    [
        ("placement", "test_places_stages", "must have equally many"),
        ("least", "test_says_how_many_micro_batches_it_needs", "needs 0 micro-batches"),
        ("missing", "test_can_run", "lacks B"),
        ("order", "test_can_run", "comes before F"),
        ("moody", "test_is_a_function_of_the_sizes", "two plans for"),
    ],
)
def test_the_kit_finds_each_fault(monkeypatch: pytest.MonkeyPatch, fault: str, test: str, told: str) -> None:
    from intarsia.plugins import current

    schedule = Broken(fault)
    real = current().build
    monkeypatch.setattr(current(), "build", lambda config, *rest: schedule if isinstance(config, OneFOneBConfig) else real(config, *rest))

    class Mine(PipelineScheduleConformance):
        __test__ = False
        entry = "intarsia-pipeline:1f1b"

    examined: Any = Mine()
    with pytest.raises(BaseException, match=told):
        getattr(examined, test)()
