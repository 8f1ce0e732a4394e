"""The loader `multimodal`: rows of whole documents with images and video. Steps, ranks and the position are those of `intarsia_data.steps`.

What a row is made of follows from the index (`intarsia_multimodal.index`) and the position alone: neither the number of workers nor of ranks, nor how far ahead
they work, changes it.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from intarsia.config import Recipe, flatten
from intarsia.contracts import Batch
from intarsia.errors import PluginError, UsageError
from intarsia_data.order import key_of, split
from intarsia_data.steps import StepLoader, order_settings, stream_key
from torch import Tensor

from intarsia_multimodal.batches import joined, stack
from intarsia_multimodal.config import MultimodalConfig
from intarsia_multimodal.contracts import Processor, check_model
from intarsia_multimodal.index import MediaIndex, Record, cut_media, fit, open_index
from intarsia_multimodal.making import Piece, Row
from intarsia_multimodal.pool import Answer, Pool
from intarsia_multimodal.rows import RowStream
from intarsia_multimodal.worker import Maker

NAMED = 20
"""How many documents with bad media the facts name."""
log = logging.getLogger("intarsia_multimodal")


def build(config: MultimodalConfig, recipe: Recipe, plugins: Any, rank: int, ranks: int, directory: Path, split: str) -> MultimodalLoader:
    """The entry's target. Errors: UsageError for settings, sources and documents that are wrong, for a processor that is not the model's, for media that the model does not see, and where none fits a row."""
    loader = MultimodalLoader(config, recipe, plugins, rank, ranks, directory, split)
    try:
        loader.check_some_fit()
        check_sees(recipe.model, loader.shown())
    except BaseException:
        loader.close()
        raise
    return loader


def check_sees(model: Any, shown: Sequence[str]) -> None:
    """UsageError for a model without a vision tower, where sources, by their names, show something: it would learn from placeholders, and nothing would say so."""
    if shown and getattr(model, "vision", None) is None:
        raise UsageError(
            f"{', '.join(shown)}: there are images or videos in its documents, and the model has no vision tower (model.vision): it would be trained on their placeholders and see nothing. "
            "Take a size of a family that sees, or leave the media out."
        )


class Patches:
    """The patches of a micro-batch, for whoever looks at it (`Batch.extra["patches_NC"]`). They are decoded when they are asked for, or by workers while the model computes the one before: so there are those of a few
    micro-batches at a time, and none where nobody looks, as in later stages of a pipeline."""

    def __init__(self, loader: MultimodalLoader, plans: Sequence[Sequence[Piece]]) -> None:
        self._loader, self._plans = loader, plans
        self._begun: list[Callable[[], Row]] | None = None

    def begin(self) -> None:
        """Have them decoded by workers, where there are any."""
        if self._begun is None:
            self._begun = self._loader.begin_rows(self._plans, True)

    def __call__(self) -> Tensor:
        """float32 [N, C]. Errors: MediaError; PluginError where the data has changed since the plan was made, and where a worker has ended."""
        try:
            self.begin()
            self._loader.begin_behind(self)
            begun, self._begun = self._begun, None
            return joined([wait().patches_NC for wait in begun or ()])
        except BaseException:
            self._loader.close()
            raise


def row_of(future: Future[Answer]) -> Row:
    """A worker's row."""
    row = future.result()[1]
    assert row is not None, "it was asked for one"
    return row


def digest_of_rows(batches: Sequence[Batch]) -> str:
    """Over the tokens, and over which of them only fill rows: alike where the same documents are there."""
    found = hashlib.blake2b(digest_size=16)
    for batch in batches:
        for tensor in (batch.tokens_BS, batch.extra.get("padding_BS")):
            found.update(b"" if tensor is None else tensor.numpy().tobytes())
    return found.hexdigest()


class MultimodalLoader(StepLoader):
    """See the module. `bad_media` counts, by reason, the documents of this rank that were padding instead; with `bad_media` "skip" `rows_digest` is that of the last step's rows.
    `after_step_made` is called behind each step that `next_step` gives."""

    def __init__(self, config: MultimodalConfig, recipe: Recipe, plugins: Any, rank: int, ranks: int, directory: Path, split: str):
        self._maker = maker = Maker(recipe, plugins, directory, split)
        self._config, self._recipe, self._plugins, self._directory, self._split = config, recipe, plugins, directory, split
        self.processor: Processor = maker.processor
        self.pad_id: int = maker.pad_id
        check_model(maker.processor, getattr(recipe, "model", None))
        self._pool_of_workers: Pool | None = None
        self._starting, self._closed = threading.Lock(), False
        names, parts, train = maker.found.names, maker.found.parts, split == "train"
        try:
            self._indices = [self._index(number) for number in range(len(names))]
            if not train:  # its workers are started when there is something to evaluate
                self.close_workers()
            fitted = [
                fit(index, recipe.train.sequence_length, config.patches, config.too_long, name)
                for index, name in zip(self._indices, names, strict=True)
            ]
            self._lengths, self._patches = [lengths for lengths, _, _ in fitted], [patches for _, patches, _ in fitted]
            self._too_long = [count for _, _, count in fitted]
            self._media_cut = [cut_media(index, lengths) for index, lengths in zip(self._indices, self._lengths, strict=True)]
            self._streams = [self._stream(number, train) for number in range(len(names))]
            weights = [part.weight for part in parts]
            settings = order_settings(recipe, maker.tokenizer, names, weights, [index.digest for index in self._indices]) | {
                "data.loader.patches": config.patches,
                "data.loader.too_long": config.too_long,
                "data.loader.open_rows": config.open_rows,
            }
            super().__init__(recipe, maker.tokenizer, names, weights, self._streams, rank, ranks, train, settings)
        except BaseException:
            self.close_workers()
            raise
        self.threads = self._prefetch + 1 if config.workers else 1
        self.bad_media: collections.Counter[str] = collections.Counter()
        self._skipped: list[str] = []
        self._given: list[Patches] = []
        self.rows_digest = ""
        self.after_step_made: Callable[[], None] = lambda: None
        self._tell_what_is_left_out()

    # ------------------------------------------------------------ what there is

    def _index(self, number: int) -> MediaIndex:
        """The index of source `number`."""
        maker, workers = self._maker, self._config.workers
        prepare = (lambda ranges: self._prepared(number, ranges)) if workers else None
        return open_index(
            maker.sources[number],
            maker.tokenizer,
            maker.processor,
            maker.found.names[number],
            maker.found.cache,
            maker.bad_media,
            prepare,
            limits=repr(getattr(maker.processor_settings, "reading", None)),
        )

    def _prepared(self, number: int, ranges: Iterable[range]) -> Iterator[list[Record]]:
        """Records of a source's documents, by the workers, in order."""
        waiting: collections.deque[Future[Answer]] = collections.deque()
        workers = self._workers()
        for each in ranges:
            waiting.append(workers.submit({"prepare": [number, each.start, each.stop]}))
            if len(waiting) > 4 * self._config.workers:
                yield waiting.popleft().result()[0]["records"]
        for future in waiting:
            yield future.result()[0]["records"]

    def _stream(self, number: int, train: bool) -> RowStream:
        """The rows of source `number` in this split."""
        recipe, data, name = self._recipe, self._recipe.data, self._maker.found.names[number]
        index = self._indices[number]
        if not index.documents:
            raise UsageError(f"{name}: the data set is empty: 0 documents.")
        if len(index.bad) == index.documents:
            raise UsageError(
                f"{name}: none of its {index.documents} documents is left: all have media that cannot be used, the first, document {index.bad[0][0]}: {index.bad[0][1]}. {index.mended()}"
            )
        kept, left_out = split(self._indices[number].lengths, 0.0 if data.evaluation else data.held_out, name)
        documents = kept if train or data.evaluation else left_out
        return RowStream(
            self._lengths[number],
            self._patches[number],
            documents[self._lengths[number][documents] > 0],
            name,
            row=recipe.train.sequence_length,
            budget=self._config.patches,
            packing=data.packing,
            key=stream_key(recipe, number, train),
            epochs=data.epochs if train else 1,
            open_rows=self._config.open_rows,
        )

    def _tell_what_is_left_out(self) -> None:
        for name, index, count, media_cut in zip(self.names, self._indices, self._too_long, self._media_cut, strict=True):
            if index.bad:
                log.warning(
                    "%s: %d documents have media that cannot be used and are left out; the first: document %d: %s. %s",
                    name,
                    len(index.bad),
                    *index.bad[0],
                    index.mended(),
                )
            if count:
                done = "cut" if self._config.too_long == "truncate" else "left out"
                lost = f"; of {len(index.media)} images and videos {media_cut} are lost by it" if media_cut else ""
                log.warning("%s: %d documents are too long for a row, and are %s%s", name, count, done, lost)

    # ------------------------------------------------------------ steps

    def make_batches(self, samples: Sequence[range]) -> list[Batch]:
        """See StepLoader. With `bad_media` "skip" all is decoded here: what cannot be is no longer trained on, and what is trained on counts before the step begins. Else when somebody looks."""
        plans = [[self._pieces(sample) for sample in each] or [[]] for each in samples]
        decode = self._config.bad_media == "skip"
        begun = [self.begin_rows(each, decode) for each in plans]
        batches = []
        for rows, each, plan in zip(begun, samples, plans, strict=True):
            patches = None if decode else Patches(self, plan)
            batches.append(stack([wait() for wait in rows], list(each) or [-1], self.processor.merge, patches))
        return batches

    def _pieces(self, sample: int) -> list[Piece]:
        """What the row of one global sample is made of."""
        source, own = self._mixture.locate(sample)
        lengths, patches = self._lengths[source], self._patches[source]
        return [Piece(source, number, int(lengths[number]), int(patches[number])) for number in self._streams[source].numbers(own)]

    def begin_rows(self, plans: Sequence[Sequence[Piece]], decode: bool) -> list[Callable[[], Row]]:
        """What waits for the rows of plans, with which the workers, where there are any, begin now."""
        if not self._config.workers:
            return [functools.partial(self._maker.rows.make, pieces, decode) for pieces in plans]
        workers = self._workers()
        futures = [workers.submit({"pieces": pieces, "decode": decode}) for pieces in plans]
        return [functools.partial(row_of, future) for future in futures]

    def begin_behind(self, patches: Patches) -> None:
        """Begin with the micro-batches behind one, of the next step too: as many as give the workers something to do."""
        following = self._given[self._given.index(patches) + 1 :] if patches in self._given else []
        if self._pending and self._pending[0].done() and not self._pending[0].exception():
            following = following + [batch.extra["patches_NC"] for batch in self._pending[0].result()]
        for each in following[: math.ceil(2 * self._config.workers / self._micro_batch)]:
            each.begin()

    def next_step(self) -> list[Batch] | None:
        """See StepLoader; counts what was padding instead of media."""
        batches = super().next_step()
        self._given = [batch.extra["patches_NC"] for batch in batches or () if isinstance(batch.extra["patches_NC"], Patches)]
        if self._config.bad_media == "skip":
            self.rows_digest = digest_of_rows(batches or ())
        for batch in batches or ():
            for what in batch.extra["bad_media"]:
                self.bad_media[what] += 1
                self._skipped.append(what)
                if self.bad_media[what] == 1:
                    log.warning("%s; its place in the row is padding", what)
        if batches is not None:
            self.after_step_made()
        return batches

    def take_skipped(self) -> list[str]:
        """What was padding instead of media since the last call."""
        taken, self._skipped = self._skipped, []
        return taken

    # ------------------------------------------------------------ workers

    def _workers(self) -> Pool:
        """The workers, started on first use."""
        with self._starting:
            if self._closed:
                raise PluginError("The loader is closed.")
            if self._pool_of_workers is None:
                setup = {"recipe": flatten(self._recipe, self._plugins), "directory": str(self._directory), "split": self._split}
                self._pool_of_workers = Pool(self._config.workers, setup, self._config.worker_timeout_s)
            return self._pool_of_workers

    def close_workers(self) -> None:
        """End the workers. They are started again when they are needed."""
        if self._pool_of_workers is not None:
            self._pool_of_workers.close()
        self._pool_of_workers = None

    def close(self) -> None:
        """See StepLoader. Workers first: what is still being prepared then ends at once."""
        with self._starting:
            self._closed = True
        self.close_workers()
        super().close()
        self._closed = False

    # ------------------------------------------------------------ facts

    def shown(self) -> list[str]:
        """The names of the sources in whose rows there are media."""
        return [name for name, stream in zip(self.names, self._streams, strict=True) if stream.patches]

    def check_some_fit(self) -> None:
        """UsageError for a source whose images and videos are all lost, since documents are too long for rows: a model would learn from what is left without them."""
        for name, index, cut in zip(self.names, self._indices, self._media_cut, strict=True):
            if cut and cut == len(index.media):
                tokens, patches = (int(sizes.min()) for sizes in (index.media[:, 1] - index.media[:, 0], index.media[:, 2]))
                raise UsageError(
                    f"{name}: none of its {cut} images and videos is left, since their documents are too long for a row: the least has {tokens} tokens and {patches} patches, and a row takes "
                    f"train.sequence_length={self._row} tokens and data.loader.patches={self._config.patches} patches. Raise these, or lower the processor's max_pixels."
                )

    def facts(self) -> dict[str, Any]:
        """What there is and what was given out so far, as JSON: documents, tokens, patches and rows of this split, what is left out and why, each source's asked and realised share."""
        sources = []
        for number, (tokens, epochs) in enumerate(self.consumed()):
            stream, index = self._streams[number], self._indices[number]
            sources.append({
                "name": self.names[number], "documents": stream.documents, "tokens": stream.tokens, "patches": stream.patches, "rows": stream.rows,
                "filled": stream.tokens / (stream.rows * self._row), "digest": index.digest, "weight": self._weights[number],
                "tokens_seen": tokens, "epochs_seen": epochs, "too_long": self._too_long[number],
                "media": len(index.media), "media_cut": self._media_cut[number],
                "bad_media": len(index.bad), "bad_media_first": [f"document {place}: {reason}" for place, reason in index.bad[:NAMED]],
            })  # fmt: skip
        seen = sum(source["tokens_seen"] for source in sources)
        for source in sources:
            source["share_seen"] = source["tokens_seen"] / seen if seen else 0.0
        names = ("documents", "tokens", "patches", "rows", "bad_media", "too_long", "media", "media_cut")
        return {
            "split": self._split, **{name: sum(source[name] for source in sources) for name in names},
            "samples": self.total, "steps": None if self.total is None else math.ceil(self.total / self._global_batch),
            "fingerprint": f"{key_of(sorted(self.depends_on.items())):016x}", "samples_seen": self.samples,
            "bad_media_seen": sum(self.bad_media.values()), "bad_media_seen_first": list(self.bad_media)[:NAMED], "sources": sources,
        }  # fmt: skip
