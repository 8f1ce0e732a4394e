"""The loader: this rank's micro-batches of each global step, and the exact position.

The position is one number, the samples consumed by all ranks together. Everything else (which documents, which tokens, which rank) follows
from it by arithmetic, so it is valid at any number of ranks and for any global batch.

A step takes the next G samples (fewer at the end of the data). Each rank gets a contiguous slice, as even as can be, in micro-batches that are as
even as can be. The number of micro-batches is the same on every rank; a rank without a sample for one gets a row of padding there. When the
data is used up, `next_step` gives None on all ranks alike.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
from intarsia.config import Recipe
from intarsia.contracts import Batch, StateItem, Tokenizer
from intarsia.errors import CheckpointError, PluginError, UsageError

from intarsia_data.batches import Row, make_row, padding_row, stack
from intarsia_data.config import PackedConfig
from intarsia_data.order import VERSION, Mixture, Stream, key_of, split
from intarsia_data.store import TokenStore, open_store


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
    own = not train and bool(data.evaluation)
    where, parts = ("data.evaluation", data.evaluation) if own else ("data.mixture", data.mixture)
    tokenizer = plugins.build(data.tokenizer)
    cache = Path(data.cache).expanduser() if data.cache else Path(directory) / "cache"
    names = [f"{where}.{number}.source ({plugins.entry_of(part.source).name})" for number, part in enumerate(parts)]
    stores = [open_store(plugins.build(part.source), tokenizer, name, cache) for name, part in zip(names, parts, strict=True)]
    return Loader(recipe, tokenizer, names, [part.weight for part in parts], stores, rank, ranks, train)


def build(config: PackedConfig, recipe: Recipe, plugins: Any, rank: int, ranks: int, directory: Path, split: str) -> Loader:
    """The registry's door to `build_loader`; the settings are all in the recipe's data section."""
    return build_loader(recipe, plugins, rank, ranks, directory, split)


class Loader:
    """See the module. `state` and `load_state` carry the position under the owner `data`."""

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, names: Sequence[str], weights: Sequence[float], stores: Sequence[TokenStore],
        rank: int, ranks: int, train: bool,
    ):  # fmt: skip
        if not 0 <= rank < ranks:
            raise UsageError(f"rank {rank} of {ranks} data-parallel ranks does not exist.")
        data = recipe.data
        self.tokenizer, self.names, self._stores = tokenizer, names, stores
        self._rank, self._ranks, self._train = rank, ranks, train
        self._row, self._micro_batch, self._global_batch = recipe.train.sequence_length, recipe.train.micro_batch, recipe.train.global_batch
        self._weights = [weight / sum(weights) for weight in weights]
        self._epochs = data.epochs if train else 1
        # Evaluation is the same whatever the seed, so that runs with different seeds compare.
        self._seed: int | str = recipe.train.seed if train else "evaluation"
        self._streams = [self._stream(recipe, number) for number in range(len(names))]
        rates = [weight / stream.tokens_per_sample for weight, stream in zip(self._weights, self._streams, strict=True)]
        self._mixture = Mixture(rates, [stream.samples for stream in self._streams])
        self.total = self._mixture.total
        if not train and self.total is not None:
            self.total = min(self.total, recipe.evaluation.batches * self._global_batch)
        self._pad_id = next((number for number in (tokenizer.pad_id, tokenizer.eos_id) if number is not None), 0)
        byte_lengths = getattr(tokenizer, "byte_lengths", None)
        self._byte_lengths = None if byte_lengths is None else numpy.asarray(byte_lengths, dtype=numpy.int64)
        # What the order of samples depends on; the number of epochs only where it decides when a source leaves the mixture.
        mixed = {f"{name} share": weight for name, weight in zip(names, self._weights, strict=True)} | {"data.epochs": data.epochs}
        self._settings = {
            "order's version": VERSION,
            "tokenizer": tokenizer.fingerprint(),
            "data.packing": data.packing,
            "data.shuffle": data.shuffle,
            "data.held_out": 0.0 if data.evaluation else data.held_out,
            "train.seed": recipe.train.seed,
            "train.sequence_length": self._row,
            **{f"{name} documents": store.digest for name, store in zip(names, stores, strict=True)},
            **(mixed if len(names) > 1 else {}),
        }
        self._prefetch = data.prefetch if train else 0
        self._pool: ThreadPoolExecutor | None = None
        self._pending: collections.deque[Future[list[Batch]]] = collections.deque()
        self.samples = self.steps = 0

    def _stream(self, recipe: Recipe, number: int) -> Stream:
        """The stream of source `number`: its documents of this split, in an order of its own."""
        data, name = recipe.data, self.names[number]
        kept, left_out = split(self._stores[number], 0.0 if data.evaluation else data.held_out, name)
        documents = kept if self._train or data.evaluation else left_out
        key = key_of(self._seed, number) if data.shuffle or not self._train else None
        epochs = data.epochs if self._train else 1
        stream = Stream(self._stores[number], documents, row=self._row, packing=data.packing, key=key, epochs=epochs)
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
        if self.samples == self.total:
            return None
        batches = self._prefetched() if self._prefetch else self.make_step(self.samples)
        self.samples, self.steps = self._after(self.samples), self.steps + 1
        return batches

    def _prefetched(self) -> list[Batch]:
        """The step at the position, made by the background thread, which is given the steps after it to make."""
        if self._pool is None:
            self._pool, self._ahead = ThreadPoolExecutor(1, thread_name_prefix="intarsia-data"), self.samples
        while len(self._pending) <= self._prefetch and self._ahead != self.total:
            self._pending.append(self._pool.submit(self.make_step, self._ahead))
            self._ahead = self._after(self._ahead)
        try:
            return self._pending.popleft().result()
        except BaseException:
            self.close()
            raise

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

    def _make_row(self, sample: int) -> Row:
        """The row of one global sample."""
        number, own = self._mixture.locate(sample)
        try:
            segments = self._streams[number].segments(own)
            return make_row(self._stores[number], segments, self._row, self._pad_id, self._byte_lengths, sample)
        except Exception as error:
            what = f"{self.names[number]}: sample {own} (global sample {sample}) cannot be made"
            raise PluginError(f"{what}: {type(error).__name__}: {error}") from error

    def reset(self, samples: int = 0, steps: int = 0) -> None:
        """Set the position, by default to the first sample: evaluation sees the same batches each time. Drops what was prepared for another one."""
        self.close()
        self.samples, self.steps = samples, steps

    def close(self) -> None:
        """End the background thread. The loader may be used again."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._pending.clear()

    def state(self) -> list[StateItem]:
        """One replicated item: samples delivered, steps, and what the order of samples depends on. Prepared batches do not count."""
        epochs = [self._streams[number].consumed(count)[1] for number, count in enumerate(self._mixture.counts(self.samples))]
        value = {"samples": self.samples, "steps": self.steps, "epochs": epochs, "settings": self._settings}
        if self.samples == self.total and any(stream.cut_tokens for stream in self._streams):
            value["ended_after_epochs"] = self._epochs
        return [StateItem("data", "position", "replicated", value)]

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """Go on after the last delivered sample. Errors: CheckpointError for a missing or broken item; UsageError when the data or what
        orders it has changed, since then no position says what was seen."""
        if "position" not in values:
            raise CheckpointError(
                "data/position is missing from the checkpoint: it is not known which samples were seen. Start a new run from its weights."
            )
        value = values["position"]
        samples, steps, saved = value["samples"], value["steps"], value["settings"]
        names = [name for name in dict.fromkeys([*saved, *self._settings]) if saved.get(name) != self._settings.get(name)]
        if names:
            lines = "\n".join(
                f"  {name}: {saved.get(name, 'absent')} when saved, {self._settings.get(name, 'absent')} now" for name in names
            )
            raise UsageError(
                f"The position in the data cannot be taken up, since the data or its order has changed:\n{lines}\nRestore it, or start a new run from the checkpoint's weights."
            )
        ended = value.get("ended_after_epochs", self._epochs)
        if ended != self._epochs:
            raise UsageError(
                f"The checkpoint has seen the data's end after data.epochs={ended}, where the last row was cut short; with data.epochs={self._epochs} the "
                "tokens that would have filled it would never be seen. Keep data.epochs, or start a new run from the checkpoint's weights."
            )
        if self.total is not None and samples > self.total:
            raise UsageError(f"The checkpoint has seen {samples} samples but the data now ends after {self.total}. Raise data.epochs.")
        self.reset(samples, steps)

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
