"""The loader `packed`: rows of tokens from token stores. Steps, ranks and the position are those of `intarsia_data.steps`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from intarsia.config import Recipe
from intarsia.contracts import Batch, Tokenizer
from intarsia.errors import PluginError, UsageError

from intarsia_data.batches import Row, make_row, padding_row, stack
from intarsia_data.config import PackedConfig
from intarsia_data.order import Stream, key_of, split
from intarsia_data.steps import Parts, StepLoader, has_evaluation, order_settings, pad_id_of, stream_key
from intarsia_data.store import TokenStore, open_store

__all__ = ["Loader", "build", "build_loader", "has_evaluation"]


def build_loader(recipe: Recipe, plugins: Any, rank: int, ranks: int, directory: Path, split: str = "train") -> Loader:
    """The loader of `rank` of `ranks` that share the data (ranks that only differ in other mesh axes give the same rank here).

    Arguments: `plugins` builds sources and tokenizer; `directory` is the run directory, which holds the token stores unless data.cache names
    another folder; `split` is "train" or "evaluation". Errors: UsageError for settings, sources and documents that are wrong.
    """
    found = Parts.of(recipe, plugins, directory, split)
    tokenizer = plugins.build(recipe.data.tokenizer)
    stores = [
        open_store(plugins.build(part.source), tokenizer, name, found.cache) for name, part in zip(found.names, found.parts, strict=True)
    ]
    return Loader(recipe, tokenizer, found.names, [part.weight for part in found.parts], stores, rank, ranks, split == "train")


def build(config: PackedConfig, recipe: Recipe, plugins: Any, rank: int, ranks: int, directory: Path, split: str) -> Loader:
    """The registry's door to `build_loader`; the settings are all in the recipe's data section."""
    return build_loader(recipe, plugins, rank, ranks, directory, split)


class Loader(StepLoader):
    """See the module."""

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, names: Sequence[str], weights: Sequence[float], stores: Sequence[TokenStore],
        rank: int, ranks: int, train: bool,
    ):  # fmt: skip
        self._stores = stores
        self._streams = [stream_of(recipe, stores[number], names[number], number, train) for number in range(len(names))]
        settings = order_settings(recipe, tokenizer, names, weights, [store.digest for store in stores])
        super().__init__(recipe, tokenizer, names, weights, self._streams, rank, ranks, train, settings)
        self._pad_id = pad_id_of(tokenizer)
        byte_lengths = getattr(tokenizer, "byte_lengths", None)
        self._byte_lengths = None if byte_lengths is None else numpy.asarray(byte_lengths, dtype=numpy.int64)

    def make_batches(self, samples: Sequence[range]) -> list[Batch]:
        """See StepLoader."""
        steps = [[self._make_row(sample) for sample in each] for each in samples]
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

    def facts(self) -> dict[str, Any]:
        """What there is and what was given out so far, as JSON: documents, tokens and bytes of this split, for each source its asked and realised share."""
        sources = []
        for number, (tokens, epochs) in enumerate(self.consumed()):
            stream, store = self._streams[number], self._stores[number]
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
            "fingerprint": f"{key_of(sorted(self.depends_on.items())):016x}", "samples_seen": self.samples, "sources": sources,
        }  # fmt: skip


def stream_of(recipe: Recipe, store: TokenStore, name: str, number: int, train: bool) -> Stream:
    """The stream of source `number`: its documents of this split, in an order of its own."""
    data, row = recipe.data, recipe.train.sequence_length
    kept, left_out = split(numpy.diff(store.offsets), 0.0 if data.evaluation else data.held_out, name)
    documents = kept if train or data.evaluation else left_out
    epochs = data.epochs if train else 1
    stream = Stream(store, documents, row=row, packing=data.packing, key=stream_key(recipe, number, train), epochs=epochs)
    if train and data.packing == "concatenate" and stream.tokens < row:
        raise UsageError(
            f"{name}: its {len(documents)} documents to train on have {stream.tokens} tokens, less than one row of train.sequence_length={row}. "
            f"Lower train.sequence_length to at most {stream.tokens}, give more data, or set data.packing=one_per_row to pad rows."
        )
    return stream
