"""`rollouts/`: what was tried, one sample a line. `step-000003.jsonl` is what the third optimizer step trained on or left out, `held_out-000003.jsonl` the evaluation after it, and
`trained-000003.jsonl` the trainer's own log-probabilities of the tokens that the step trained on, one segment a line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from intarsia.errors import UsageError

from intarsia_rl.contracts import Sample, Segment
from intarsia_rl.controller.state import sample_to_json

FOLDER = "rollouts"
NAME = re.compile(r"(step|held_out|trained)-(\d{6,})\.jsonl")


class RolloutWriter:
    """Writes a run's samples. `decode` makes text of a segment's tokens."""

    def __init__(self, directory: Path, decode: Callable[[Sequence[int]], str]):
        self._folder, self._decode = directory / FOLDER, decode

    def resume(self, step: int) -> None:
        """Drop what a run that is resumed after `step` finished steps will do again."""
        for _, number, path in files(self._folder):
            if number > step:
                path.unlink(missing_ok=True)

    def write(self, kind: str, number: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """One file, whole: what was there under this name is replaced. UsageError where it cannot be written."""
        path = self._folder / f"{kind}-{number:06}.jsonl"
        temporary = path.with_suffix(".tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # What UTF-8 has no bytes for (half of a surrogate pair, which broken output of tools brings) becomes its JSON escape.
            with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
                for line in lines:
                    file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise UsageError(
                f"The rollouts cannot be written to {path}: {error.strerror or error}. Make room there, or set data.loader.keep_rollouts=false, and resume the run: nothing that was trained on is lost."
            ) from error

    def line(self, sample: Sample, **further: Any) -> dict[str, Any]:
        """A sample as it is written: `further` fields first, each segment's text, no routes."""
        # Without them first: they are large, and would be turned into text for nothing.
        bare = dataclasses.replace(
            sample, segments=tuple(dataclasses.replace(segment, routes=None, media=()) for segment in sample.segments)
        )
        value = sample_to_json(bare)
        segments = [self._segment(segment, shown) for segment, shown in zip(sample.segments, value["segments"], strict=True)]
        return {**further, **value, "segments": segments}

    def _segment(self, segment: Segment, shown: dict[str, Any]) -> dict[str, Any]:
        shown["text"] = self._decode(segment.tokens)
        if segment.routes is not None:
            shown["routes"] = {"shape": list(segment.routes.shape)}
        if segment.media:  # their content is in the turns
            shown["media"] = [{"at": each.at, "kind": each.media.kind} for each in segment.media]
        return shown


def files(folder: Path) -> list[tuple[str, int, Path]]:
    """(kind, number, path) of the files in a `rollouts/` folder, in order."""
    found = [(match, path) for path in folder.glob("*.jsonl") if (match := NAME.fullmatch(path.name))]
    return sorted((match[1], int(match[2]), path) for match, path in found)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The samples (or segments) of a file; lines that are no JSON object (cut off by a kill or a full disk) are left out."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "id" in record:
                yield record
