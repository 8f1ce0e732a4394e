"""Events as TensorBoard scalars, by tensorboard's own writer: neither torch nor TensorFlow is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from intarsia_tensorboard.config import TensorBoardConfig

SKIPPED = frozenset({"schema", "event", "time_s", "elapsed_s", "step", "metrics"})
PREFIXES = {"step": "train", "evaluation": "evaluation"}


def scalars(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Tag and value of every number of a step or evaluation event: `train/loss`, `evaluation/bits_per_byte`."""
    prefix = PREFIXES.get(event["event"])
    if prefix is None:
        return
    for name, value in {**event, **event.get("metrics", {})}.items():
        if name not in SKIPPED and isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{name}", float(value)


class TensorBoardSink:
    """An `intarsia.contracts.MetricSink`."""

    def __init__(self, directory: Path, flush_s: int):
        self._writer = EventFileWriter(str(directory), flush_secs=flush_s)

    def write(self, event: Mapping[str, Any]) -> None:
        """The numbers of step and evaluation events; others have none to plot."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(event)]
        if values:
            self._writer.add_event(Event(wall_time=event["time_s"], step=int(event["step"]), summary=Summary(value=values)))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def build(config: TensorBoardConfig, run_directory: Path) -> TensorBoardSink:
    """The entry's target."""
    return TensorBoardSink(Path(run_directory) / config.directory, config.flush_s)
