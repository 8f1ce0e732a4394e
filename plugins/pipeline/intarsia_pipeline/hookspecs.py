"""The hook of this distribution: pipeline schedules are entries. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import offer


@offer("pipeline schedule", base="intarsia_pipeline.config:PipelineScheduleConfig")
def offer_pipeline_schedules() -> Sequence[Entry]:
    """Pipeline schedules. Target: `build(config) -> PipelineSchedule` (`intarsia_pipeline.actions`), in a module that imports no torch."""
    return ()
