"""From settings to a checked schedule. Torch-free."""

from __future__ import annotations

import dataclasses
from typing import Any

from intarsia import plugins
from intarsia.errors import PluginError, UsageError

from intarsia_pipeline.actions import PipelineSchedule, Schedule, freeze
from intarsia_pipeline.config import PipelineScheduleConfig
from intarsia_pipeline.lower import with_messages, with_sharding
from intarsia_pipeline.validate import Facts, validate

KIND = "pipeline schedule"


def schedule_of(config: PipelineScheduleConfig) -> PipelineSchedule:
    """What `config` stands for, built by whoever owns its class."""
    made = plugins.current().build(config)
    if not isinstance(made, PipelineSchedule):
        entry = plugins.current().entry_of(config)
        raise PluginError(
            f"{KIND} {entry.full_name!r}: {entry.target} gave {type(made).__name__}, which must have placement, least and plan."
        )
    return made


def name_of(config: PipelineScheduleConfig) -> str:
    """The entry's name."""
    return plugins.current().entry_of(config).name


def make(config: PipelineScheduleConfig, ranks: int, micro_batches: int) -> Schedule:
    """The schedule for these sizes, as its entry gives it, unchecked. UsageError for sizes below 1."""
    if ranks < 1 or micro_batches < 1:
        raise UsageError(f"A pipeline has at least 1 rank and 1 micro-batch, not {ranks} and {micro_batches}.")
    source = schedule_of(config)
    return Schedule(name_of(config), tuple(source.placement(ranks)), micro_batches, freeze(source.plan(ranks, micro_batches)))


def check_micro_batches(config: PipelineScheduleConfig, ranks: int, micro_batches: int, few: bool = False) -> None:
    """UsageError, with the numbers and the nearest that would do, where there are fewer micro-batches than the schedule needs, unless `few` allows it."""
    least = schedule_of(config).least(ranks)
    if micro_batches >= least or few:
        return
    raise UsageError(
        f"Schedule {name_of(config)!r} on {ranks} pipeline ranks needs at least {least} micro-batches in a step, and there {'is' if micro_batches == 1 else 'are'} {micro_batches}: "
        f"ranks would stand idle. Take {least} (smaller train.micro_batch, larger train.global_batch), a mesh.pp of at most {_most_ranks(config, ranks, micro_batches)}, or "
        "engine.few_micro_batches=True to run it all the same."
    )


def _most_ranks(config: PipelineScheduleConfig, ranks: int, micro_batches: int) -> int:
    source = schedule_of(config)
    return next((fewer for fewer in range(ranks - 1, 0, -1) if source.least(fewer) <= micro_batches), 1)


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Where the actions of the sharder are put; see `PipelineConfig`."""

    unshard: str = "step"
    unshard_ahead: int = 1
    reduce: str = "last"
    max_live: int | None = None

    @classmethod
    def of(cls, config: Any) -> Knobs:
        """From a PipelineConfig."""
        return cls(config.unshard, config.unshard_ahead, config.reduce, config.max_live)


def ready(config: PipelineScheduleConfig, ranks: int, micro_batches: int, knobs: Knobs | None = None) -> tuple[Schedule, Facts]:
    """A schedule with all its actions, validated as it will run."""
    knobs = knobs or Knobs()
    bare = make(config, ranks, micro_batches)
    validate(bare, knobs.max_live)
    full = with_messages(with_sharding(bare, knobs.unshard, knobs.unshard_ahead, knobs.reduce))
    return full, validate(full)
