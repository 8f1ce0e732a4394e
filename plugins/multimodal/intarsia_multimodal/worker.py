"""A process that prepares documents and makes rows: `python -m intarsia_multimodal.worker`. It ends when its standard input does, and so with whoever started it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from intarsia.config import Recipe, rebuild
from intarsia.errors import IntarsiaError, PluginError, UsageError
from intarsia.plugins import current, verify_child
from intarsia_data.steps import Parts, pad_id_of

from intarsia_multimodal import wire
from intarsia_multimodal.contracts import MediaError
from intarsia_multimodal.index import records_of
from intarsia_multimodal.making import Piece, RowMaker

KINDS: dict[str, type[IntarsiaError]] = {"MediaError": MediaError, "UsageError": UsageError, "PluginError": PluginError}
"""What an error of a worker is raised as by the loader; anything else is a PluginError."""


class Maker:
    """Sources, tokenizer and processor of a split, built from the recipe: the same in every process."""

    def __init__(self, recipe: Recipe, plugins: Any, directory: Path, split: str):
        self.found = Parts.of(recipe, plugins, directory, split)
        settings: Any = recipe.data.loader
        self.bad_media, self.processor_settings = settings.bad_media, settings.processor
        self.tokenizer = plugins.build(recipe.data.tokenizer)
        self.processor = plugins.build(settings.processor, self.tokenizer)
        self.sources = [plugins.build(part.source) for part in self.found.parts]
        self.pad_id = pad_id_of(self.tokenizer)
        self.byte_lengths = getattr(self.tokenizer, "byte_lengths", None)
        self.rows = RowMaker(
            self.sources, self.found.names, self.processor, recipe.train.sequence_length, self.pad_id, self.byte_lengths, self.bad_media
        )


def answer(maker: Maker, job: dict[str, Any], descriptor: int) -> None:
    """Do one job: prepare documents of a source, or make a row."""
    if "prepare" in job:
        source, first, last = job["prepare"]
        name = maker.found.names[source]
        records = records_of(maker.sources[source], maker.processor, name, range(first, last), maker.bad_media)
        wire.send(descriptor, {"records": records})
    else:
        wire.send(descriptor, {}, maker.rows.make([Piece(*piece) for piece in job["pieces"]], job.get("decode", True)))


def main() -> None:
    """Serve jobs from standard input; the first message says what to build. What others print goes to standard error."""
    asked, answers = 0, os.dup(1)
    os.dup2(2, 1)
    maker = None
    while True:
        try:
            job, _ = wire.receive(asked)
        except EOFError:
            return
        try:
            if maker is None:
                verify_child()
                maker = Maker(rebuild(job["recipe"], current()), current(), Path(job["directory"]), job["split"])
                wire.send(answers, {})
            else:
                answer(maker, job, answers)
        except BrokenPipeError:
            return
        except Exception as error:
            known = next((kind for kind in KINDS if type(error).__name__ == kind), None)
            text = str(error) if known or isinstance(error, IntarsiaError) else f"{type(error).__name__}: {error}"
            wire.send(answers, {"error": known or "PluginError", "text": text})


if __name__ == "__main__":
    main()
