"""For any documents, batch sizes, ranks and epochs: every token is given out exactly as often as there are epochs, alike on all ranks."""

from __future__ import annotations

import collections
import hashlib
import tempfile
import types
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from intarsia.config import DataConfig, EvaluationConfig, MixturePart, TrainConfig
from intarsia.contracts import IGNORE, Document
from intarsia.errors import UsageError
from intarsia_data import build_loader
from intarsia_data.config import ByteTokenizerConfig, PackedConfig, StdlibConfig
from intarsia_data.order import VERSION, Mixture, mix, scatter

NEW = 1_000_000


class Numbered:
    """Documents whose ids are all different: document d of source s has ids from a range of its own."""

    def __init__(self, lengths, first):
        starts = numpy.cumsum([first, *lengths]).tolist()
        self.ids = [tuple(range(start, start + length)) for start, length in zip(starts[:-1], lengths, strict=True)]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return Document(tokens=self.ids[index])

    def fingerprint(self):
        return hashlib.sha256(repr(self.ids).encode()).hexdigest()


class Plain:
    vocab_size, bos_id, eos_id, pad_id = 2 * NEW, None, None, 2 * NEW - 1

    def decode(self, ids):
        return ""

    def fingerprint(self):
        return "plain"


def loaders_of(sources, ranks, *, epochs, packing, row, micro_batch, global_batch, folder, seed=0, weights=None):
    parts = tuple(MixturePart(source=StdlibConfig(limit=n + 1), weight=weights[n] if weights else 1.0) for n in range(len(sources)))
    recipe = types.SimpleNamespace(
        data=DataConfig(
            loader=PackedConfig(), tokenizer=ByteTokenizerConfig(), mixture=parts, held_out=0.0, prefetch=0, epochs=epochs, packing=packing
        ),
        train=TrainConfig(sequence_length=row, micro_batch=micro_batch, global_batch=global_batch, seed=seed),
        evaluation=EvaluationConfig(),
    )
    plugins = types.SimpleNamespace(
        build=lambda config: Plain() if isinstance(config, ByteTokenizerConfig) else sources[config.limit - 1],
        entry_of=lambda config: types.SimpleNamespace(name="numbered"),
    )
    return [build_loader(recipe, plugins, rank, ranks, Path(folder)) for rank in range(ranks)]


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40),
    micro_batch=st.integers(1, 5),
    global_batch=st.integers(1, 12),
    ranks=st.integers(1, 9),
    epochs=st.integers(1, 3),
    stop=st.integers(0, 6),
    new_ranks=st.integers(1, 9),
    new_batch=st.integers(1, 12),
)
def test_ranks_keep_in_step_and_nothing_is_seen_twice(count, micro_batch, global_batch, ranks, epochs, stop, new_ranks, new_batch):
    """Ten samples, micro-batch 2, three ranks is one of these; so is stopping and going on with other numbers."""
    with tempfile.TemporaryDirectory() as folder:
        common = {"epochs": epochs, "packing": "one_per_row", "row": 3, "folder": folder}
        source = [Numbered([3] * count, 0)]
        loaders = loaders_of(source, ranks, micro_batch=micro_batch, global_batch=global_batch, **common)
        seen, documents, steps = [], collections.Counter(), 0
        while True:
            given_out = [loader.next_step() for loader in loaders]
            assert len({step is None for step in given_out}) == 1
            if given_out[0] is None:
                break
            assert len({len(step) for step in given_out}) == 1
            assert len({loader.samples for loader in loaders}) == 1
            for batch in (batch for step in given_out for batch in step):
                assert 1 <= len(batch.samples) <= micro_batch
                seen += [sample for sample in batch.samples if sample >= 0]
                documents.update(int(row[0]) // 3 for row, sample in zip(batch.tokens_BS, batch.samples, strict=True) if sample >= 0)
            steps += 1
            if steps == stop:
                state = {"position": loaders[0].state()[0].value}
                loaders = loaders_of(source, new_ranks, micro_batch=micro_batch, global_batch=new_batch, **common)
                for loader in loaders:
                    loader.load_state(state)
        assert sorted(seen) == list(range(count * epochs))
        assert documents == dict.fromkeys(range(count), epochs)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), min_size=1, max_size=3),
    row=st.integers(1, 12),
    epochs=st.integers(1, 3),
    packing=st.sampled_from(["concatenate", "one_per_row"]),
    ranks=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_every_token_is_seen_once_in_each_epoch_with_its_successor_as_label(lengths, row, epochs, packing, ranks, seed):
    row = min(row, *(sum(one) for one in lengths))
    sources = [Numbered(one, first=number * NEW // 4) for number, one in enumerate(lengths)]
    successor = {a: b for source in sources for ids in source.ids for a, b in zip(ids, (*ids[1:], IGNORE), strict=False)}
    kept = {token for source in sources for ids in source.ids for token in (ids[:row] if packing == "one_per_row" else ids)}
    with tempfile.TemporaryDirectory() as folder:
        loaders = loaders_of(
            sources, ranks, epochs=epochs, packing=packing, row=row, micro_batch=2, global_batch=4, folder=folder, seed=seed
        )
        seen: collections.Counter[int] = collections.Counter()
        while (steps := [loader.next_step() for loader in loaders])[0] is not None:
            for batch in (batch for step in steps for batch in step):
                ids, labels = batch.tokens_BS.tolist(), batch.labels_BS.tolist()
                for number, documents in enumerate(batch.lengths):
                    assert sum(documents) == row
                    assert batch.positions_BS[number].tolist() == [place for length in documents for place in range(length)]
                    assert batch.documents_BS[number].tolist() == [n for n, length in enumerate(documents) for _ in range(length)]
                    for token, label in zip(ids[number], labels[number], strict=True):
                        assert label == successor.get(token, IGNORE)
                        seen[token] += 1
        del seen[Plain.pad_id]
        assert seen == dict.fromkeys(kept, epochs)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 10), st.one_of(st.none(), st.integers(1, 50))), min_size=1, max_size=5), st.integers(0, 300))
def test_mixture_is_even_and_gives_each_sample_of_each_stream_once(parts, samples):
    rates, sizes = [rate for rate, _ in parts], [size for _, size in parts]
    mixture = Mixture(rates, sizes)
    assert mixture.total == (None if None in sizes else sum(sizes))
    samples = samples if mixture.total is None else min(samples, mixture.total)
    located = [mixture.locate(sample) for sample in range(samples)]
    for stream in range(len(parts)):
        assert [number for one, number in located if one == stream] == list(range(mixture.counts(samples)[stream]))
    endless = Mixture(rates, [None] * len(rates))
    for count, rate in zip(endless.counts(samples), rates, strict=True):
        assert abs(count - samples * rate / sum(rates)) <= 1 + len(rates) / 2


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 2000), st.integers(0, 2**64 - 1))
def test_scatter_is_a_permutation(count, key):
    assert sorted(scatter(index, count, key) for index in range(count)) == list(range(count))


def test_a_batch_is_rows_from_all_over_the_data(tmp_path):
    """Documents of fifty rows: a step of eight rows used to be one of them, and so was the next, so that the loss jumped with each document."""
    sources = [Numbered([500] * 40, 0)]
    (loader,) = loaders_of(sources, 1, epochs=None, packing="concatenate", row=10, micro_batch=8, global_batch=8, folder=tmp_path)
    steps = [loader.next_step() for _ in range(20)]
    documents = [len({int(token) // 500 for token in step[0].tokens_BS[:, 0]}) for step in steps]
    assert sum(documents) / len(documents) > 6, documents


def test_the_hash_that_orders_documents_never_changes():
    """Golden values: another order would break every resume."""
    assert mix(numpy.array([0, 1, 2**40]), 12345).tolist() == [17540659726606785873, 2454886589211414944, 5156559243297113287]
    assert [scatter(index, 10, 12345) for index in range(10)] == [0, 7, 2, 5, 8, 9, 4, 3, 6, 1]


def test_the_order_is_that_of_its_version(tmp_path):
    """Where this fails, a checkpoint's position has come to mean other tokens: raise `intarsia_data.order.VERSION`, then this test."""
    sources = [Numbered([7, 3, 11, 1, 5, 9], 0), Numbered([4, 8], NEW)]
    (loader,) = loaders_of(sources, 1, epochs=2, packing="concatenate", row=4, micro_batch=3, global_batch=3, folder=tmp_path)
    seen = []
    while (step := loader.next_step()) is not None:
        seen += [ids for batch in step for ids in batch.tokens_BS.tolist()]
    (item,) = loader.state()
    assert item.value["settings"]["order's version"] == VERSION
    assert (VERSION, hashlib.sha256(repr(seen).encode()).hexdigest()[:16]) == (2, "19ef15d95ca02f56")
    older = item.value | {"settings": item.value["settings"] | {"order's version": 1}}
    with pytest.raises(UsageError, match="order's version: 1 when saved, 2 now"):
        loader.load_state({"position": older})
