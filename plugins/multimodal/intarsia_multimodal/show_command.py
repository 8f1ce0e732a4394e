"""`intarsia media RECIPE`: the rows that a run would be given, document by document, and the images as the model sees them."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chz
from intarsia.config import resolve
from intarsia.errors import UsageError
from intarsia.plugins import current

from intarsia_multimodal.config import MultimodalConfig

if TYPE_CHECKING:
    import numpy
    from intarsia.contracts import Batch

    from intarsia_multimodal.loader import MultimodalLoader

WIDTH = 400
"""Characters of a document's text that are shown."""


class MediaCommand:
    """The command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The command's arguments."""
        parser.add_argument("recipe", help="name of a recipe, path.py:function, run directory or recipe.json")
        parser.add_argument("overrides", nargs="*", default=[], metavar="PATH=VALUE", help="overrides, such as data.loader.patches=2048")
        parser.add_argument(
            "--with", dest="transforms", action="append", default=[], metavar="TRANSFORM", help="apply a transform (repeatable)"
        )
        parser.add_argument("--steps", type=int, default=1, metavar="N", help="show the rows of the first N steps (default 1)")
        parser.add_argument("--split", choices=("train", "evaluation"), default="train", help="which documents (default train)")
        parser.add_argument(
            "--images", type=Path, metavar="DIR", help="write the images and frames as the model sees them into DIR, as PNG"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Print to standard output."""
        if arguments.steps < 1:
            raise UsageError(f"--steps is {arguments.steps}; it must be at least 1.")
        recipe = resolve(arguments.recipe, arguments.overrides, arguments.transforms).recipe
        settings = recipe.data.loader
        if not isinstance(settings, MultimodalConfig):
            raise UsageError(
                f"The recipe's loader is {current().entry_of(settings).name}, whose documents have no media. Choose data.loader=multimodal, or a recipe of a model that sees."
            )
        # In this process: what goes wrong is told where it is.
        recipe = chz.replace(recipe, data=chz.replace(recipe.data, loader=chz.replace(settings, workers=0), prefetch=0))
        with tempfile.TemporaryDirectory() as folder:
            loader: Any = current().build(recipe.data.loader, recipe, current(), 0, 1, Path(folder), arguments.split)
            for line in facts_lines(loader.facts()):
                print(line)
            for step in range(arguments.steps):
                batches = loader.next_step()
                if batches is None:
                    print(f"The data ends after {step} steps.")
                    break
                for batch in batches:
                    for line in batch_lines(loader, batch):
                        print(line)
                    patches_NC = batch.extra["patches_NC"]()  # what cannot be decoded is told, be it to be seen or not
                    if arguments.images is not None:
                        save(loader, batch, patches_NC.numpy(), arguments.images)
        return 0


def facts_lines(facts: dict[str, Any]) -> Iterator[str]:
    """What there is, a line for each source."""
    for source in facts["sources"]:
        lost = f" (by which {source['media_cut']} of {source['media']} media are lost)" if source["media_cut"] else ""
        yield (
            f"{source['name']}: {source['documents']} documents, {source['tokens']} tokens, {source['patches']} patches in {source['rows']} rows, "
            f"filled to {source['filled']:.1%}; {source['too_long']} too long{lost}, {source['bad_media']} with media that cannot be used"
        )
        for reason in source["bad_media_first"]:
            yield f"  {reason}"


def batch_lines(loader: MultimodalLoader, batch: Batch) -> Iterator[str]:
    """A batch's rows and documents. What is trained on stands between > and <, a medium as its grid."""
    grids = list(batch.extra["grids"])
    for row, (sample, lengths) in enumerate(zip(batch.samples, batch.lengths, strict=True)):
        yield f"sample {sample}"
        at = 0
        for length in lengths:
            here = slice(at, at + length)
            tokens, labels, visual = (values[row, here].tolist() for values in (batch.tokens_BS, batch.labels_BS, batch.extra["visual_BS"]))
            trained = [False, *(label >= 0 for label in labels[:-1])]
            text = "(padding)" if set(tokens) == {loader.pad_id} else text_of(loader, tokens, trained, visual, grids)
            yield f"  {length} tokens: {text[:WIDTH]}"
            at += length
    for what in batch.extra["bad_media"]:
        yield f"  padding instead of {what}"


def text_of(
    loader: MultimodalLoader, tokens: Sequence[int], trained: Sequence[bool], visual: Sequence[int], grids: list[tuple[int, int, int]]
) -> str:
    """A document's text. Takes the grids of its media from `grids`."""
    parts: list[str] = []
    run: list[int] = []
    merge, state, left = loader.processor.merge, False, 0
    for token, is_trained, feature in zip(tokens, trained, visual, strict=True):
        if run and (feature >= 0 or is_trained != state):
            parts.append(loader.tokenizer.decode(run))
            run = []
        if is_trained != state:
            parts.append(">" if is_trained else "<")
            state = is_trained
        if feature < 0:
            run.append(token)
        elif left:
            left -= 1
        else:
            frames, rows, columns = grids.pop(0)
            left = frames * rows * columns // merge**2 - 1
            parts.append(f"[{frames} x {rows} x {columns} patches, {left + 1} tokens]")
    parts += [loader.tokenizer.decode(run), "<" if state else ""]
    return "".join(parts).replace("\n", "\\n")


def save(loader: MultimodalLoader, batch: Batch, patches_NC: numpy.ndarray, folder: Path) -> None:
    """Write a batch's images and frames, named by the batch's first sample and their number in it."""
    from PIL import Image

    picture = getattr(loader.processor, "picture", None)
    if picture is None:
        raise UsageError(
            f"The processor {type(loader.processor).__name__} cannot make images of patches: it has no method `picture`. Leave out --images."
        )
    folder.mkdir(parents=True, exist_ok=True)
    at = 0
    for number, grid in enumerate(batch.extra["grids"]):
        count = grid[0] * grid[1] * grid[2]
        frames = picture(patches_NC[at : at + count], grid)
        at += count
        for place, frame in enumerate(frames if grid[0] > 1 else frames[:1]):
            name = f"{max(batch.samples[0], 0):06d}-{number:03d}" + (f"-{place:03d}" if grid[0] > 1 else "")
            Image.fromarray(frame).save(folder / f"{name}.png")
