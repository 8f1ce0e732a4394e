"""What this distribution offers. Torch-free."""

from __future__ import annotations

from intarsia.contracts import Entry, Run, StepSummary
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_sharders() -> list[Entry]:
    """FlexShard."""
    return [
        Entry(
            name="flexshard",
            config="intarsia_flexshard.config:FlexShardConfig",
            target="intarsia_flexshard.runtime:build",
            doc="Parameters as shards in buckets, cut by any placement; float32 masters with other compute dtypes.",
        )
    ]


@hookimpl
def before_step(run: Run, step: int) -> None:
    """Measure the steps of `profile.steps`, bucket by bucket."""
    if run.recipe.profile.steps:
        from intarsia_flexshard.timeline import begin_step

        begin_step(run, step)


@hookimpl
def after_step(run: Run, summary: StepSummary) -> None:
    """Write what was measured into the run's events."""
    if summary.step in run.recipe.profile.steps:
        from intarsia_flexshard.timeline import end_step

        end_step(run, summary.step)
