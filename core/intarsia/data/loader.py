"""The loader: this rank's micro-batches of each global step, and the exact position.

The position is one number, the samples consumed by all ranks together. Everything else (which documents, which tokens, which rank) follows
from it by arithmetic, so it is valid at any number of ranks and for any global batch.

A step takes the next G samples (fewer at the end of the data). Each rank gets a contiguous slice, as even as can be, in micro-batches that are as
even as can be. The number of micro-batches is the same on every rank; a rank without a sample for one gets a row of padding there. When the
data is used up, `next_step` gives None on all ranks alike.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from intarsia.config import MixturePart, Recipe
from intarsia.contracts import Batch, StateItem, Tokenizer
from intarsia.data.batches import make_row, padding_row, stack
from intarsia.data.order import Mixture, Stream, key_of, split
from intarsia.data.store import TokenStore, open_store
from intarsia.errors import CheckpointError, IntarsiaError, PluginError, UsageError

PACKINGS = ("concatenate", "one_per_row")


def has_evaluation(recipe: Recipe) -> bool:
    """Whether there is anything to evaluate on."""
    return bool(recipe.data.evaluation) or recipe.data.held_out > 0


def build_loader(recipe: Recipe, plugins: Any, rank: int, ranks: int, directory: Path, split: str = "train") -> Loader:
    """The loader of `rank` of `ranks` that share the data (ranks that only differ in other mesh axes give the same rank here).

    Arguments: `plugins` builds sources and tokenizer; `directory` is the run directory, which holds the token stores unless data.cache names
    another folder; `split` is "train" or "evaluation". Errors: UsageError for settings, sources and documents that are wrong.
    """
    data, train = recipe.data, split == "train"
    if split not in ("train", "evaluation"):
        raise UsageError(f"split={split!r} is unknown; it is train or evaluation.")
    if not train and not has_evaluation(recipe):
        raise UsageError(
            "There is nothing to evaluate on: set data.held_out above 0, name sources in data.evaluation, or set evaluation.every=0."
        )
    _check_settings(recipe)
    own = not train and bool(data.evaluation)
    where, parts = ("data.evaluation", data.evaluation) if own else ("data.mixture", data.mixture)
    tokenizer = plugins.build(data.tokenizer)
    cache = Path(data.cache).expanduser() if data.cache else Path(directory) / "cache"
    stores: list[TokenStore] = []
    for number, part in enumerate(parts):
        stores.append(open_store(plugins.build(part.source), tokenizer, _source_name(where, number, part, plugins), cache))
    return Loader(
        recipe,
        tokenizer,
        [_source_name(where, number, part, plugins) for number, part in enumerate(parts)],
        parts,
        stores,
        rank,
        ranks,
        train,
    )


def _source_name(where: str, number: int, part: MixturePart, plugins: Any) -> str:
    """`data.mixture.0.source (text)`: how messages call a source."""
    return f"{where}.{number}.source ({plugins.entry_of(part.source).name})"


def _check_settings(recipe: Recipe) -> None:
    """Settings that no source is needed to refuse."""
    data, train = recipe.data, recipe.train
    if data.packing not in PACKINGS:
        raise UsageError(f"data.packing={data.packing!r} is unknown; it is {' or '.join(PACKINGS)}.")
    for name, value in (
        ("sequence_length", train.sequence_length),
        ("micro_batch", train.micro_batch),
        ("global_batch", train.global_batch),
    ):
        if value < 1:
            raise UsageError(f"train.{name}={value} must be at least 1.")
    for name, value in (("epochs", data.epochs), ("prefetch", data.prefetch + 1)):
        if value is not None and value < 1:
            raise UsageError(f"data.{name} must be at least {1 if name == 'epochs' else 0}.")
    if not data.mixture:
        raise UsageError("data.mixture is empty: name at least one source.")
    for where, parts in (("data.mixture", data.mixture), ("data.evaluation", data.evaluation)):
        for number, part in enumerate(parts):
            if not (part.weight > 0 and math.isfinite(part.weight)):
                raise UsageError(
                    f"{where}.{number}.weight={part.weight} must be above 0. Leave a source out rather than giving it no weight."
                )


class Loader:
    """See the module. `state` and `load_state` carry the position under the owner `data`."""

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, names: Sequence[str], parts: Sequence[MixturePart], stores: Sequence[TokenStore],
        rank: int, ranks: int, train: bool,
    ):  # fmt: skip
        if not 0 <= rank < ranks:
            raise UsageError(f"rank {rank} of {ranks} data-parallel ranks does not exist.")
        data = recipe.data
        self.tokenizer, self.names, self._stores, self._rank, self._ranks, self._train = (
            tokenizer,
            list(names),
            list(stores),
            rank,
            ranks,
            train,
        )
        self._row, self._micro_batch, self._global_batch = recipe.train.sequence_length, recipe.train.micro_batch, recipe.train.global_batch
        self._weights = [part.weight / sum(part.weight for part in parts) for part in parts]
        # Evaluation is the same whatever the seed, so that runs with different seeds compare.
        self._seed: int | str = recipe.train.seed if train else "evaluation"
        self._streams = [self._stream(recipe, number) for number in range(len(parts))]
        rates = [weight / stream.tokens_per_sample for weight, stream in zip(self._weights, self._streams, strict=True)]
        self._mixture = Mixture(rates, [stream.samples for stream in self._streams])
        self.total = self._mixture.total
        if not train and self.total is not None:
            self.total = min(self.total, recipe.evaluation.batches * self._global_batch)
        pad = next((number for number in (tokenizer.pad_id, tokenizer.eos_id) if number is not None), 0)
        self._pad_id = pad
        byte_lengths = getattr(tokenizer, "byte_lengths", None)
        self._byte_lengths = None if byte_lengths is None else numpy.asarray(byte_lengths, dtype=numpy.int64)
        self._settings = {
            "tokenizer": tokenizer.fingerprint(),
            "data.packing": data.packing,
            "data.shuffle": data.shuffle,
            "data.held_out": 0.0 if data.evaluation else data.held_out,
            "train.seed": recipe.train.seed,
            "train.sequence_length": self._row,
            **{f"{name} documents": store.digest for name, store in zip(names, stores, strict=True)},
        }
        if len(parts) > 1:
            self._settings |= {
                "data.epochs": data.epochs,
                **{f"{name} share": weight for name, weight in zip(names, self._weights, strict=True)},
            }
        self._prefetch = data.prefetch if train else 0
        self._producer: _Producer | None = None
        self.samples = self.steps = 0

    def _stream(self, recipe: Recipe, number: int) -> Stream:
        """The stream of source `number`: its documents of this split, in an order of its own."""
        data, store, name = recipe.data, self._stores[number], self.names[number]
        held_out = 0.0 if data.evaluation else data.held_out
        kept, left_out = split(store, held_out, name)
        documents = kept if self._train or data.evaluation else left_out
        key = key_of(self._seed, number) if data.shuffle or not self._train else None
        epochs = data.epochs if self._train else 1
        stream = Stream(store, documents, row=self._row, packing=data.packing, key=key, epochs=epochs)
        if self._train and data.packing == "concatenate" and stream.tokens < self._row:
            raise UsageError(
                f"{name}: its {len(documents)} documents to train on have {stream.tokens} tokens, less than one row of train.sequence_length={self._row}. "
                f"Lower train.sequence_length to at most {stream.tokens}, give more data, or set data.packing=one_per_row to pad rows."
            )
        return stream

    def next_step(self) -> list[Batch] | None:
        """This rank's micro-batches of the next global step; None at the end of the data. Moves the position.

        Errors: what went wrong while the batches were made, in the background or here, with the source and sample named.
        """
        if self.total is not None and self.samples >= self.total:
            return None
        if not self._prefetch:
            batches = self.make_step(self.samples)
        else:
            if self._producer is None:
                self._producer = _Producer(self, self.samples, self._prefetch)
            batches = self._producer.take()
        self.samples = self._after(self.samples)
        self.steps += 1
        return batches

    def _after(self, position: int) -> int:
        """The position after the step at `position`."""
        return position + self._global_batch if self.total is None else min(position + self._global_batch, self.total)

    def make_step(self, position: int) -> list[Batch]:
        """This rank's micro-batches of the step that begins with global sample `position`. Pure."""
        count = self._after(position) - position
        start, stop = (position + count * edge // self._ranks for edge in (self._rank, self._rank + 1))
        largest = math.ceil(count / self._ranks)
        micro_batches = math.ceil(largest / self._micro_batch)
        edges = [start + (stop - start) * number // micro_batches for number in range(micro_batches + 1)]
        steps = [[self._make_row(sample) for sample in range(first, last)] for first, last in itertools.pairwise(edges)]
        return [stack(rows or [padding_row(self._row, self._pad_id)], self._row) for rows in steps]

    def _make_row(self, sample: int) -> Any:
        """The row of one global sample."""
        number, own = self._mixture.locate(sample)
        try:
            store, segments = self._stores[number], self._streams[number].segments(own)
            return make_row(store, segments, self._row, self._pad_id, self._byte_lengths, sample)
        except IntarsiaError:
            raise
        except Exception as error:
            raise PluginError(
                f"{self.names[number]}: sample {own} (global sample {sample}) cannot be made: {type(error).__name__}: {error}"
            ) from error

    def reset(self) -> None:
        """Back to the first sample: evaluation sees the same batches each time."""
        self._seek(0, 0)

    def _seek(self, samples: int, steps: int) -> None:
        """Set the position; what was prepared for another one is thrown away."""
        self.close()
        self.samples, self.steps = samples, steps

    def close(self) -> None:
        """End the background thread. The loader may be used again."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def state(self) -> list[StateItem]:
        """One replicated item: samples delivered, steps, and what the order of samples depends on. Prepared batches do not count."""
        epochs = [self._streams[number].consumed(count)[1] for number, count in enumerate(self._mixture.counts(self.samples))]
        value = {"samples": self.samples, "steps": self.steps, "epochs": epochs, "settings": self._settings}
        return [StateItem("data", "position", "replicated", value)]

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """Go on after the last delivered sample. Errors: CheckpointError for a missing or broken item; UsageError when the data or what
        orders it has changed, since then no position says what was seen."""
        if "position" not in values:
            raise CheckpointError(
                "data/position is missing from the checkpoint: it is not known which samples were seen. Start a new run from its weights."
            )
        value = values["position"]
        try:
            samples, steps, saved = int(value["samples"]), int(value["steps"]), dict(value["settings"])
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"data/position in the checkpoint cannot be understood: {error!r}.") from error
        names = [name for name in dict.fromkeys([*saved, *self._settings]) if saved.get(name) != self._settings.get(name)]
        if names:
            lines = "\n".join(
                f"  {name}: {saved.get(name, 'absent')} when saved, {self._settings.get(name, 'absent')} now" for name in names
            )
            raise UsageError(
                f"The position in the data cannot be taken up, since the data or its order has changed:\n{lines}\nRestore it, or start a new run from the checkpoint's weights."
            )
        if samples < 0 or (self.total is not None and samples > self.total):
            raise UsageError(f"The checkpoint has seen {samples} samples but the data now ends after {self.total}. Raise data.epochs.")
        self._seek(samples, steps)

    def facts(self) -> dict[str, Any]:
        """What there is and what was given out so far, as JSON: documents, tokens and bytes of this split, for each source its asked and realised share."""
        sources = []
        for number, count in enumerate(self._mixture.counts(self.samples)):
            stream, store = self._streams[number], self._stores[number]
            tokens, epochs = stream.consumed(count)
            sources.append({
                "name": self.names[number], "documents": len(stream.lengths), "tokens": stream.tokens, "digest": store.digest,
                "bytes_per_token": int(store.document_bytes.sum()) / store.token_count,
                "weight": self._weights[number], "tokens_seen": tokens, "epochs_seen": epochs,
            })  # fmt: skip
        seen, tokens = sum(source["tokens_seen"] for source in sources), sum(source["tokens"] for source in sources)
        for source in sources:
            source["share_seen"] = source["tokens_seen"] / seen if seen else 0.0
        return {
            "split": "train" if self._train else "evaluation", "documents": sum(source["documents"] for source in sources), "tokens": tokens,
            "samples": self.total, "steps": None if self.total is None else math.ceil(self.total / self._global_batch),
            "bytes_per_token": sum(source["bytes_per_token"] * source["tokens"] for source in sources) / tokens,
            "fingerprint": f"{key_of(sorted(self._settings.items())):016x}", "samples_seen": self.samples, "sources": sources,
        }  # fmt: skip


class _Producer:
    """A thread that makes steps ahead, at most `depth` of them."""

    def __init__(self, loader: Loader, position: int, depth: int):
        self._queue: queue.Queue[list[Batch] | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._loader, self._position = loader, position
        self._thread = threading.Thread(target=self._run, name="intarsia-data", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set() and (self._loader.total is None or self._position < self._loader.total):
            try:
                item: list[Batch] | BaseException = self._loader.make_step(self._position)
                self._position = self._loader._after(self._position)
            except BaseException as error:
                item = error
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return

    def take(self) -> list[Batch]:
        """The next step's batches, or the error that ended the thread (again at each call)."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)
            raise item
        return item

    def close(self) -> None:
        """Stop and join the thread."""
        self._stop.set()
        self._thread.join()
