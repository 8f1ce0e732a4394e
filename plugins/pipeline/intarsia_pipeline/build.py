"""From settings to a checked schedule. Torch-free."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from intarsia import plugins
from intarsia.config import EngineConfig
from intarsia.contracts import Entry
from intarsia.errors import IntarsiaError, PluginError, UsageError

from intarsia_pipeline.actions import Action, PipelineSchedule, Plan, Schedule
from intarsia_pipeline.config import PipelineScheduleConfig
from intarsia_pipeline.lower import with_messages, with_sharding
from intarsia_pipeline.validate import Facts, validate

KIND = "pipeline schedule"


class Asked:
    """A schedule whose answers are held against the contract: what it raises and what it gives wrongly are PluginErrors that name its entry."""

    def __init__(self, entry: Entry, source: PipelineSchedule) -> None:
        self._entry, self._source = entry, source

    def placement(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage: whole numbers from 0 to ranks - 1."""
        given = self._ask("placement", lambda: tuple(self._source.placement(ranks)), ranks)
        if not all(_is_whole(each) and 0 <= each < ranks for each in given):
            raise self._wrong("placement", f"{_short(given)}: each stage's rank is a whole number from 0 to {ranks - 1}.", ranks)
        return given  # type: ignore[no-any-return]

    def least(self, ranks: int) -> int:
        """A whole number from 1 on."""
        given = self._ask("least", lambda: self._source.least(ranks), ranks)
        if not _is_whole(given) or given < 1:
            raise self._wrong("least", f"{given!r}: a number of micro-batches is whole, and at least 1.", ranks)
        return int(given)

    def plan(self, ranks: int, micro_batches: int) -> Plan:
        """For each of `ranks` its actions."""
        sizes = (ranks, micro_batches)
        given = self._ask("plan", lambda: tuple(tuple(actions) for actions in self._source.plan(*sizes)), *sizes)
        if len(given) != ranks:
            raise self._wrong("plan", f"actions for {len(given)} ranks, and there are {ranks}.", *sizes)
        for rank, actions in enumerate(given):
            for position, action in enumerate(actions):
                if not (isinstance(action, Action) and _is_whole(action.stage) and _is_whole(action.micro_batch)):
                    raise self._wrong(
                        "plan",
                        f"{action!r} at rank {rank}, position {position}: an action is Action(kind, stage, micro_batch), with whole numbers.",
                        *sizes,
                    )
        return given  # type: ignore[no-any-return]

    def _ask(self, method: str, call: Callable[[], Any], *sizes: int) -> Any:
        try:
            return call()
        except IntarsiaError:
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = f"no answer: {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            raise self._wrong(method, text, *sizes) from error

    def _wrong(self, method: str, text: str, *sizes: int) -> PluginError:
        asked = ", ".join(map(str, sizes))
        return PluginError(f"{KIND} {self._entry.full_name!r} of plugin {self._entry.plugin}: {method}({asked}) gave {text}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(given: Sequence[Any]) -> str:
    return repr(list(given[:16])) + (" and so on" if len(given) > 16 else "")


def schedule_of(config: PipelineScheduleConfig) -> Asked:
    """What `config` stands for, built by whoever owns its class."""
    loaded = plugins.current()
    made, entry = loaded.build(config), loaded.entry_of(config)
    if not isinstance(made, PipelineSchedule):
        raise PluginError(
            f"{KIND} {entry.full_name!r}: {entry.target} gave {type(made).__name__}, which must have placement, least and plan."
        )
    return Asked(entry, made)


def name_of(config: PipelineScheduleConfig | EngineConfig) -> str:
    """The entry's name."""
    return plugins.current().entry_of(config).name


def make(config: PipelineScheduleConfig, ranks: int, micro_batches: int) -> Schedule:
    """The schedule for these sizes, as its entry gives it, unchecked. UsageError for sizes below 1."""
    if ranks < 1 or micro_batches < 1:
        raise UsageError(f"A pipeline has at least 1 rank and 1 micro-batch, not {ranks} and {micro_batches}.")
    source = schedule_of(config)
    return Schedule(name_of(config), source.placement(ranks), micro_batches, source.plan(ranks, micro_batches))


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
