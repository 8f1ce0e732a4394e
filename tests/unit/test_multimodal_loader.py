"""The loader of rows with images: contents, budgets, order, positions, policies, workers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import types

import chz
import numpy
import pytest
import torch
from intarsia.config import DataConfig, EvaluationConfig, MixturePart, TrainConfig, flatten
from intarsia.contracts import IGNORE, Document, Media, Message
from intarsia.errors import DistributedError, PluginError, UsageError
from intarsia.plugins import current
from intarsia_data.config import ByteTokenizerConfig, StdlibConfig
from intarsia_llama3.recipes import debug
from intarsia_multimodal import hooks, wire
from intarsia_multimodal.config import DrawnConfig, MediaJsonlConfig, MultimodalConfig, ReadingConfig
from intarsia_multimodal.contracts import MediaError, check_model
from intarsia_multimodal.loader import MultimodalLoader
from intarsia_multimodal.loader import build as entry
from intarsia_multimodal.making import RowMaker
from intarsia_multimodal.patches import PatchProcessor
from intarsia_multimodal.plugin import after_build
from intarsia_multimodal.pool import COMMAND

from tests.support.documents import Listed
from tests.support.media import SMALL, SPECIALS, encoded, image, noise, smooth, tokenizer

IMAGE_TOKENS, IMAGE_PATCHES = 6, 16
"""Of a 16 x 16 image with SMALL: 4 features between two marks; 16 patches."""


class Doubles:
    """Plugins with sources in memory."""

    def __init__(self, *sources):
        self.sources, self.prepared = sources, []

    def build(self, config, *arguments):
        if isinstance(config, ByteTokenizerConfig):
            return tokenizer()
        if isinstance(config, StdlibConfig):
            return self.sources[config.limit - 1]
        made = PatchProcessor(config, *arguments)
        whole = made.prepare
        made.prepare = lambda document: (self.prepared.append(document), whole(document))[1]
        return made

    def entry_of(self, config):
        return types.SimpleNamespace(name="listed")


def recipe(sources=1, weights=None, data=None, loader=None, model=None, batches=8, **train):
    mixture = tuple(MixturePart(source=StdlibConfig(limit=n + 1), weight=(weights or [1.0] * sources)[n]) for n in range(sources))
    settings = {"held_out": 0.0, "prefetch": 0, "epochs": 1} | (data or {})
    chosen = MultimodalConfig(**({"processor": SMALL, "workers": 0, "patches": 64} | (loader or {})))
    return types.SimpleNamespace(
        data=DataConfig(loader=chosen, tokenizer=ByteTokenizerConfig(), mixture=mixture, **settings),
        train=TrainConfig(**({"sequence_length": 32, "micro_batch": 2, "global_batch": 4} | train)),
        evaluation=EvaluationConfig(batches=batches),
        model=model,
    )


def build(settings, plugins, folder, rank=0, ranks=1, split="train"):
    return MultimodalLoader(settings.data.loader, settings, plugins, rank, ranks, folder, split)


def document(number, images=1):
    """A document whose text says its number; its images are its own."""
    return Document(parts=(f"{number:03d}", *(image(16, 16, 10 * number + each) for each in range(images))))


def everything(loader):
    """All batches that are left, looked at one by one."""
    found = []
    while (batches := loader.next_step()) is not None:
        found += [looked_at(batch) for batch in batches]
    return found


def looked_at(batch):
    """The batch with its patches made."""
    patches_NC = batch.extra["patches_NC"]()
    return dataclasses.replace(batch, extra={**batch.extra, "patches_NC": lambda: patches_NC})


def texts(batches):
    """The text of every document, in order."""
    found = []
    for batch in batches:
        for tokens, lengths in zip(batch.tokens_BS.tolist(), batch.lengths, strict=True):
            at = 0
            for length in lengths:
                found.append(bytes(number for number in tokens[at : at + length] if number < 256).decode())
                at += length
    return [text for text in found if text]


def batch_padding(batch):
    """Which tokens only fill rows."""
    return batch.extra.get("padding_BS", torch.zeros_like(batch.tokens_BS, dtype=torch.bool))


def equal(one, other):
    """Whether two lists of batches are the same in all that they hold."""
    if len(one) != len(other):
        return False
    for first, second in zip(one, other, strict=True):
        named = [(first.extra[name], second.extra[name]) for name in ("positions_3BS", "visual_BS")]
        named += [(first.extra["patches_NC"](), second.extra["patches_NC"]())]
        named += [(batch_padding(first), batch_padding(second))]
        named += [(getattr(first, name), getattr(second, name)) for name in ("tokens_BS", "labels_BS", "positions_BS", "documents_BS")]
        plain = [
            (batch.extra["grids"], batch.lengths, batch.samples, batch.extra["bad_media"], batch.extra["bytes"])
            for batch in (first, second)
        ]
        if not all(torch.equal(*pair) for pair in named) or plain[0] != plain[1]:
            return False
    return True


# ------------------------------------------------------------ contents


def test_a_batch_holds_what_the_processor_makes_of_its_documents(tmp_path):
    talk = Document(messages=(Message("user", ("see", image(16, 24, 5), "this")), Message("assistant", "yes")))
    documents = [document(0), document(1, images=2), Document(text="only text"), talk, document(4, images=0)]
    (first, *_) = build(recipe(sequence_length=40, global_batch=8, micro_batch=8), Doubles(Listed(documents)), tmp_path).next_step()
    made = PatchProcessor(SMALL, tokenizer())
    by_text = {made.tokenizer.decode(made.prepare(each).tokens_N): made.prepare(each) for each in documents}
    features, media = 0, []
    seen = 0
    for row, lengths in enumerate(first.lengths):
        at = 0
        for length in lengths:
            here = slice(at, at + length)
            tokens = first.tokens_BS[row, here]
            at += length
            text = made.tokenizer.decode(tokens.tolist())
            if not text:
                assert (first.labels_BS[row, here] == IGNORE).all() and (first.extra["visual_BS"][row, here] == -1).all(), "padding"
                assert first.extra["positions_3BS"][:, row, here].tolist() == [list(range(length))] * 3
                assert first.extra["padding_BS"][row, here].all()
                continue
            assert not first.extra["padding_BS"][row, here].any()
            seen += 1
            prepared = by_text[text]
            assert tokens.tolist() == prepared.tokens_N.tolist()
            assert first.extra["positions_3BS"][:, row, here].tolist() == prepared.positions_3N.tolist()
            assert first.positions_BS[row, here].tolist() == list(range(length))
            labels = [number if trained else IGNORE for number, trained in zip(prepared.tokens_N, prepared.trained_N, strict=True)]
            assert first.labels_BS[row, here].tolist() == [*labels[1:], IGNORE]
            expected = numpy.full(length, -1)
            for slot in prepared.media:
                media.append(slot)
                for begin, count in slot.spans:
                    expected[begin : begin + count] = numpy.arange(features, features + count)
                    features += count
            assert first.extra["visual_BS"][row, here].tolist() == expected.tolist()
    assert seen == len(documents) and first.extra["grids"] == tuple(slot.grid for slot in media)
    assert numpy.array_equal(first.extra["patches_NC"]().numpy(), numpy.concatenate([made.load(slot) for slot in media]))
    assert sum(int(numpy.prod(grid)) for grid in first.extra["grids"]) == len(first.extra["patches_NC"]()) == 4 * features
    assert first.extra["bytes"] == sum(1 for label in first.labels_BS.flatten().tolist() if 0 <= label < 256)
    media_ids = {*made.ids.values()}
    assert not media_ids & set(first.labels_BS.flatten().tolist()), "no token of a medium is trained on"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda visual: numpy.where(visual == 2, -1, visual), "has 15 tokens in whose places visual features stand, and 16 features"),
        (lambda visual: numpy.where(visual >= 0, visual.max() - visual, visual), "must count the 16 features in the order of tokens"),
    ],
)
def test_places_of_features_are_checked_before_they_reach_a_device(tmp_path, change, words):
    loader = build(recipe(data={"shuffle": False}, global_batch=2), Doubles(Listed([document(n) for n in range(6)])), tmp_path)
    make, done = loader._maker.rows.make, []

    def changed(pieces, decode):
        row = make(pieces, decode)
        done.append(row)
        return row if len(done) > 1 else dataclasses.replace(row, visual_S=change(row.visual_S))

    loader._maker.rows.make = changed
    with pytest.raises(PluginError, match=words):
        loader.next_step()


def test_a_batch_without_any_image_has_no_patches_and_says_so_alike(tmp_path):
    (batch,) = build(recipe(global_batch=1), Doubles(Listed([Document(text="text")])), tmp_path).next_step()
    patches_NC = batch.extra["patches_NC"]()
    assert patches_NC.shape == (0, 96) and patches_NC.dtype == torch.float32 and batch.extra["grids"] == ()
    assert torch.equal(batch.extra["positions_3BS"], batch.positions_BS.expand(3, -1, -1))
    loaders = [build(recipe(global_batch=4), Doubles(Listed([document(0)])), tmp_path, rank, 3) for rank in range(3)]
    steps = [loader.next_step() for loader in loaders]
    shapes = [[batch.extra["patches_NC"]().shape for batch in step] for step in steps]
    assert sorted(shapes) == [[(0, 96)], [(0, 96)], [(16, 96)]], "ranks without a sample have a row of padding"
    assert sorted(batch.samples for step in steps for batch in step) == [(-1,), (-1,), (0,)]
    assert all(set(batch.extra) == set(steps[0][0].extra) for step in steps for batch in step)


def test_documents_stay_whole_within_both_budgets(tmp_path):
    documents = [document(number, images=number % 4) for number in range(40)]
    batches = everything(build(recipe(loader={"patches": 48}), Doubles(Listed(documents)), tmp_path))
    assert sorted(texts(batches)) == [f"{number:03d}" for number in range(40)]
    for batch in batches:
        for row, lengths in enumerate(batch.lengths):
            assert sum(lengths) == 32
            assert 4 * int((batch.extra["visual_BS"][row] >= 0).sum()) <= 48


def test_one_document_in_each_row(tmp_path):
    batches = everything(build(recipe(data={"packing": "one_per_row"}), Doubles(Listed([document(n) for n in range(5)])), tmp_path))
    assert sum(len(batch.lengths) for batch in batches) == 5 and all(len(lengths) == 2 for batch in batches for lengths in batch.lengths)


# ------------------------------------------------------------ too long


def long_document():
    """bos, 3 bytes, an image, 2 bytes, an image, 3 bytes, eos: 22 tokens, 32 patches."""
    return Document(parts=("abc", image(), "de", image(16, 16, 1), "fgh"))


@pytest.mark.parametrize(
    ("length", "patches", "kept", "images"),
    [
        (22, 32, 22, 2),
        (21, 32, 21, 2),
        (18, 32, 18, 2),
        (17, 32, 12, 1),  # the second image would be cut in two: from it on all is cut
        (13, 32, 12, 1),
        (11, 32, 11, 1),
        (9, 32, 4, 0),
        (5, 32, 4, 0),
        (3, 32, 3, 0),
        (22, 31, 12, 1),
        (22, 15, 4, 0),
    ],
)
def test_a_document_is_never_cut_inside_an_image(tmp_path, length, patches, kept, images):
    settings = recipe(sequence_length=length, loader={"patches": patches}, data={"packing": "one_per_row"}, global_batch=1)
    loader = build(settings, Doubles(Listed([long_document()])), tmp_path)
    (batch,) = loader.next_step()
    assert batch.lengths[0][0] == kept and len(batch.extra["grids"]) == images
    whole = PatchProcessor(SMALL, tokenizer()).prepare(long_document()).tokens_N
    assert batch.tokens_BS[0, :kept].tolist() == whole[:kept].tolist()
    assert loader.facts()["too_long"] == int(kept < 22)


def test_documents_that_are_too_long_are_left_out_or_stop_the_run(tmp_path):
    documents = [long_document(), Document(text="short")]
    loader = build(recipe(sequence_length=16, loader={"too_long": "skip"}), Doubles(Listed(documents)), tmp_path)
    assert texts(everything(loader)) == ["short"] and loader.facts()["too_long"] == 1
    with pytest.raises(
        UsageError,
        match=r"document 0 has 22 tokens and 32 patches, and a row takes train.sequence_length=16 tokens .*1 documents are too long",
    ):
        build(recipe(sequence_length=16, loader={"too_long": "stop"}), Doubles(Listed(documents)), tmp_path)
    first = Document(parts=(image(64, 64), "never seen"))
    with pytest.raises(UsageError, match="none of its documents is left"):
        build(recipe(loader={"patches": 8, "too_long": "skip"}), Doubles(Listed([first])), tmp_path)
    (batch,) = build(recipe(loader={"patches": 8}, global_batch=1), Doubles(Listed([first])), tmp_path).next_step()
    assert batch.extra["padding_BS"].tolist() == [[False] + [True] * 31]
    assert batch.lengths[0] == (1, 31), "bos is all that stands before its image"


def test_images_that_are_lost_by_cutting_are_counted_and_not_all_lost(tmp_path, caplog):
    """A model that is to see would learn from what is left of conversations without their images."""
    big, small = Document(parts=("a", image(16, 16, 1), image(64, 64), image(16, 16, 2), "lost")), document(1)
    for policy, lost in (("truncate", 2), ("skip", 3)):
        caplog.clear()
        loader = build(recipe(loader={"patches": 32, "too_long": policy}), Doubles(Listed([big, small])), tmp_path / policy)
        facts = loader.facts()
        assert (facts["media"], facts["media_cut"], facts["sources"][0]["media_cut"]) == (4, lost, lost)
        assert f"of 4 images and videos {lost} are lost by it" in caplog.text
    whole = build(recipe(loader={"patches": 1024}, sequence_length=256), Doubles(Listed([big, small])), tmp_path / "whole").facts()
    assert (whole["media"], whole["media_cut"]) == (4, 0)
    told = r"none of its 3 images and videos is left, .*the least has 6 tokens and 16 patches, and a row takes train.sequence_length=32 tokens and data.loader.patches=8 "
    for policy in ("truncate", "skip"):
        settings = recipe(loader={"patches": 8, "too_long": policy})
        with pytest.raises(UsageError, match=told):
            entry(settings.data.loader, settings, Doubles(Listed([big, Document(text="text")])), 0, 1, tmp_path / f"{policy} 8", "train")
    settings = recipe(loader={"patches": 8})
    assert (
        entry(settings.data.loader, settings, Doubles(Listed([Document(text="text" * 20)])), 0, 1, tmp_path, "train").facts()["too_long"]
        == 1
    )


# ------------------------------------------------------------ bad media


def damaged(number, share=0.5):
    """A document whose image has a good header and this share of its bytes."""
    whole = encoded(smooth(60, 60, number))
    return Document(parts=(f"{number:03d}", Media("image", whole[: int(share * len(whole))])))


def test_media_that_cannot_be_prepared_stop_or_are_left_out_and_named(tmp_path, caplog):
    documents = [document(0), Document(parts=("001", Media("image", b"x"))), document(2), Document(parts=(Media("image", "no/file.png"),))]
    with pytest.raises(
        MediaError,
        match=r"data.mixture.0.source \(listed\): document 1 has a medium that cannot be used: image of 1 bytes: .*data.loader.bad_media=skip",
    ):
        build(recipe(), Doubles(Listed(documents)), tmp_path)
    with caplog.at_level("WARNING"):
        loader = build(recipe(loader={"bad_media": "skip"}), Doubles(Listed(documents)), tmp_path)
    assert "2 documents have media that cannot be used and are left out; the first: document 1: image of 1 bytes" in caplog.text
    assert sorted(texts(everything(loader))) == ["000", "002"]
    (facts,) = loader.facts()["sources"]
    assert (loader.facts()["bad_media"], facts["documents"]) == (2, 2)
    assert [words.partition(":")[0] for words in facts["bad_media_first"]] == ["document 1", "document 3"]


def test_what_is_mended_or_allowed_is_looked_at_again(tmp_path):
    path, plugins = tmp_path / "a.png", Doubles(Listed([document(0), Document(parts=("001", Media("image", str(tmp_path / "a.png"))))]))
    skipping = {"bad_media": "skip"}
    assert build(recipe(loader=skipping), plugins, tmp_path).facts()["bad_media"] == 1
    path.write_bytes(encoded(smooth(16, 16)))
    assert build(recipe(), plugins, tmp_path).facts()["documents"] == 2, "a run that stops at bad media looks at all of them"
    narrow = chz.replace(SMALL, reading=ReadingConfig(max_source_pixels=100))
    assert (
        build(
            recipe(loader={"processor": chz.replace(narrow, patch=2), **skipping}),
            Doubles(Listed([document(0), Document(text="t")])),
            tmp_path,
        ).facts()["bad_media"]
        == 1
    )
    wide = chz.replace(SMALL, patch=2)
    assert (
        build(recipe(loader={"processor": wide, **skipping}), Doubles(Listed([document(0), Document(text="t")])), tmp_path).facts()[
            "bad_media"
        ]
        == 0
    )


def test_a_kept_index_says_where_it_is_when_media_have_changed(tmp_path, caplog):
    plugins = Doubles(Listed([document(0), Document(parts=("001", Media("image", str(tmp_path / "a.png"))))]))
    with caplog.at_level("WARNING"):
        build(recipe(loader={"bad_media": "skip"}), plugins, tmp_path)
    (folder,) = (tmp_path / "cache").glob("*/facts.json")
    assert f"Where they have been mended since, remove {folder.parent}" in caplog.text


@pytest.mark.parametrize("bad_media", ["stop", "skip"])
def test_a_source_without_documents_is_told(tmp_path, bad_media):
    with pytest.raises(UsageError, match=r"the data set is empty: 0 documents"):
        build(recipe(loader={"bad_media": bad_media}), Doubles(Listed([])), tmp_path)


def test_a_source_with_nothing_but_bad_media_says_what_is_wrong(tmp_path):
    documents = [Document(parts=(Media("image", b"x"),))] * 3
    with pytest.raises(
        UsageError,
        match=r"none of its 3 documents is left: all have media that cannot be used, the first, document 0: image of 1 bytes: it is no image",
    ):
        build(recipe(loader={"bad_media": "skip"}), Doubles(Listed(documents)), tmp_path)


def test_media_that_cannot_be_decoded_become_padding_of_the_same_length(tmp_path):
    documents = [document(0), damaged(1), document(2)]
    settings = recipe(loader={"bad_media": "skip", "patches": 1024}, data={"shuffle": False}, sequence_length=256, global_batch=1)
    loader = build(settings, Doubles(Listed(documents)), tmp_path)
    (batch,) = loader.next_step()
    made = PatchProcessor(SMALL, tokenizer())
    lengths = [len(made.prepare(each).tokens_N) for each in documents]
    assert batch.lengths[0] == (*lengths, 256 - sum(lengths)), "the plan of rows stays as it was"
    place = slice(lengths[0], lengths[0] + lengths[1])
    assert (batch.tokens_BS[0, place] == 258).all() and (batch.labels_BS[0, place] == IGNORE).all() and len(batch.extra["grids"]) == 2
    where = numpy.repeat([False, True, False, True], batch.lengths[0])
    assert batch.extra["padding_BS"][0].tolist() == where.tolist(), "so that no balance loss counts them"
    (what,) = batch.extra["bad_media"]
    assert what.startswith("data.mixture.0.source (listed): document 1: image of") and "truncated" in what
    facts = loader.facts()
    assert (
        facts["bad_media_seen"] == 1
        and facts["bad_media_seen_first"] == [what]
        and loader.take_skipped() == [what]
        and not loader.take_skipped()
    )
    stopping = recipe(loader={"patches": 1024}, sequence_length=256, global_batch=1)
    with pytest.raises(MediaError, match=r"document 1 has a medium that cannot be used: image of .*truncated"):
        everything(build(stopping, Doubles(Listed(documents)), tmp_path))


def run_of(loader, others=None):
    """A run whose mesh has two data-parallel ranks and, with `others`, a second rank that shares rows and says so; and what it records."""
    recorded = []
    data = types.SimpleNamespace(size=2, all_reduce=lambda tensor, what: tensor * 2, gather_json=lambda value, what: [value, ["three"]])
    sharing = types.SimpleNamespace(size=1 if others is None else 2, gather_json=lambda value, what: [value, others])
    mesh = types.SimpleNamespace(comm=lambda *axes: data if axes == hooks.DATA_AXES else sharing)
    return types.SimpleNamespace(
        parts={"data": loader, "mesh": mesh}, record=lambda event, **fields: recorded.append((event, fields))
    ), recorded


def test_documents_that_are_padding_are_recorded_as_an_event():
    mine = ["one", "two"]
    run, recorded = run_of(types.SimpleNamespace(take_skipped=lambda: mine, rows_digest="a"))
    hooks.record_skipped(run, 4)
    assert recorded == [("bad_media", {"step": 5, "split": "train", "count": 4, "documents": ["one", "two", "three"]})]
    mine.clear()
    hooks.record_skipped(run, 5)
    assert len(recorded) == 1, "a step without any is no event"


def test_ranks_that_share_rows_must_leave_out_the_same(tmp_path):
    """Each decodes for itself: what one rank could decode and the other could not would be computed with in silence."""
    documents, whole = ([document(0), damaged(1, share)] for share in (0.5, 1.0))
    settings = recipe(loader={"patches": 1024, "bad_media": "skip"}, sequence_length=256, global_batch=1)
    loader, other = (build(settings, Doubles(Listed(each)), tmp_path / name) for name, each in (("bad", documents), ("good", whole)))
    loader.next_step()
    other.next_step()
    run, recorded = run_of(loader, [loader.rows_digest, ["at another address"]])
    hooks.record_skipped(run, 0)
    assert recorded, "the same document, whatever each rank says is wrong with it"
    loader.reset()
    loader.next_step()
    run, recorded = run_of(loader, [other.rows_digest, other.take_skipped()])
    with pytest.raises(
        DistributedError,
        match=r"Step 0: .*0: .*document 1: image of .*truncated.* \| 1: none that others have not.*not the same everywhere",
    ):
        hooks.record_skipped(run, 0)
    assert not recorded


def test_evaluations_compare_and_record_what_they_leave_out(tmp_path):
    """Each step of them, before anything is computed: ranks that hold different rows would wait for each other's images, or tell a loss of neither."""
    documents, whole = ([document(0), damaged(1, share)] for share in (0.5, 1.0))
    settings = recipe(loader={"patches": 1024, "bad_media": "skip"}, data={"held_out": 0.5}, sequence_length=256, global_batch=1)
    sources = [Doubles(Listed([each[1], each[0]])) for each in (documents, whole)]  # the first is held out
    loader, other = (build(settings, each, tmp_path / str(number), split="evaluation") for number, each in enumerate(sources))
    other.next_step()
    run, recorded = run_of(None, [other.rows_digest, other.take_skipped()])
    run.parts["evaluation"], run.recipe, run.step = loader, settings, 7
    after_build(run, "model")
    assert loader.next_step() is not None and not recorded, "before the stage of data nobody watches"
    loader.reset()
    after_build(run, "data")
    with pytest.raises(
        DistributedError, match=r"Evaluation after step 7: .*document 0: image of .*truncated.* \| 1: none that others have not"
    ):
        loader.next_step()
    run, recorded = run_of(None, [loader.rows_digest, []])
    run.parts["evaluation"], run.recipe, run.step = loader, settings, 7
    after_build(run, "data")
    loader.reset()
    while loader.next_step() is not None:
        pass
    ((event, fields),) = recorded
    assert (event, fields["step"], fields["split"], fields["count"]) == ("bad_media", 7, "evaluation", 2)
    assert "document 0: image of" in fields["documents"][0] and not loader.take_skipped()


def test_data_that_changes_under_a_run_is_found(tmp_path):
    source = Listed([document(0), document(1)])
    loader = build(recipe(), Doubles(source), tmp_path)
    source.documents = [Document(text="another"), Document(text="other")]
    with pytest.raises(
        PluginError,
        match=r"document \d cannot be read: it has \d+ tokens and 0 patches, and had 11 and 16 when its index was made.* touch .* data.cache",
    ):
        loader.next_step()


# ------------------------------------------------------------ order and position


def forty():
    return Doubles(Listed([document(number, images=number % 3) for number in range(40)]))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_share_out_what_one_rank_sees(tmp_path, ranks):
    whole = everything(build(recipe(data={"epochs": 2}), forty(), tmp_path))
    loaders = [build(recipe(data={"epochs": 2}), forty(), tmp_path, rank, ranks) for rank in range(ranks)]
    rows = {}
    while (steps := [loader.next_step() for loader in loaders])[0] is not None:
        assert len({len(step) for step in steps}) == 1, "as many micro-batches on every rank"
        for batch in (batch for step in steps for batch in step):
            rows |= {sample: tokens for sample, tokens in zip(batch.samples, batch.tokens_BS, strict=True) if sample >= 0}
    expected = {sample: tokens for batch in whole for sample, tokens in zip(batch.samples, batch.tokens_BS, strict=True)}
    assert rows.keys() == expected.keys() and all(torch.equal(rows[sample], expected[sample]) for sample in rows)


def test_each_epoch_sees_every_document_once_in_another_order(tmp_path):
    loader = build(recipe(data={"epochs": 3}, global_batch=1), forty(), tmp_path)
    rows = loader.total // 3
    epochs = [[text for _ in range(rows) for text in texts(loader.next_step())] for _ in range(3)]
    assert loader.next_step() is None
    assert all(sorted(epoch) == sorted(epochs[0]) == [f"{number:03d}" for number in range(40)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert texts(everything(build(recipe(seed=7), forty(), tmp_path))) != epochs[0], "another seed, another order"
    in_order = texts(everything(build(recipe(data={"shuffle": False}, loader={"open_rows": 1}), forty(), tmp_path)))
    assert in_order == [f"{number:03d}" for number in range(40)]


@pytest.mark.parametrize("steps", [1, 4])
def test_a_resumed_loader_goes_on_as_if_it_had_never_stopped(tmp_path, steps):
    settings = recipe(data={"epochs": 2})
    unbroken = everything(build(settings, forty(), tmp_path))
    loader = build(settings, forty(), tmp_path)
    before = [batch for _ in range(steps) for batch in loader.next_step()]
    (item,) = loader.state()
    resumed = build(recipe(data={"epochs": 2, "prefetch": 2}), forty(), tmp_path / "elsewhere")
    resumed.load_state({item.name: item.value})
    assert (resumed.samples, resumed.steps) == (4 * steps, steps)
    assert equal(before + everything(resumed), unbroken)
    resumed.close()
    others = [build(recipe(data={"epochs": 2}, global_batch=3), forty(), tmp_path, rank, 2) for rank in range(2)]
    rest = []
    for other in others:
        other.load_state({item.name: item.value})
    while (batches := [other.next_step() for other in others])[0] is not None:
        rest += [sample for step in batches for batch in step for sample in batch.samples if sample >= 0]
    assert sorted(rest) == list(range(4 * steps, loader.total)), "at another number of ranks, with another global batch"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loader": {"patches": 63}}, "data.loader.patches: 64 when saved, 63 now"),
        ({"loader": {"too_long": "skip"}}, "data.loader.too_long: truncate when saved, skip now"),
        ({"loader": {"open_rows": 3}}, "data.loader.open_rows: 16 when saved, 3 now"),
        ({"loader": {"processor": chz.replace(SMALL, min_pixels=1024)}}, r"documents: \w+ when saved, \w+ now"),
        ({"seed": 1}, "train.seed: 0 when saved, 1 now"),
    ],
)
def test_a_position_in_another_order_is_refused(tmp_path, change, words):
    (item,) = build(recipe(), forty(), tmp_path).state()
    with pytest.raises(UsageError, match=words):
        build(recipe(**change), forty(), tmp_path).load_state({item.name: item.value})


def test_what_was_prepared_is_kept(tmp_path):
    first = forty()
    build(recipe(), first, tmp_path)
    assert len(first.prepared) == 40
    again = forty()
    build(recipe(), again, tmp_path)
    assert not again.prepared
    other = forty()
    build(recipe(loader={"processor": chz.replace(SMALL, merge=1)}), other, tmp_path)
    assert len(other.prepared) == 40, "another processor has an index of its own"


def test_mixtures_are_shares_of_tokens(tmp_path):
    many = Listed([document(number) for number in range(60)])
    few = Listed([Document(text=f"text {number}") for number in range(20)])
    loader = build(recipe(2, weights=[3.0, 1.0], data={"epochs": None}, global_batch=20), Doubles(many, few), tmp_path)
    for _ in range(10):
        loader.next_step()
    first, second = loader.facts()["sources"]
    assert first["share_seen"] == pytest.approx(0.75, abs=0.02) and second["epochs_seen"] > 1
    assert loader.total is None and loader.facts()["patches"] == 60 * 16


def test_held_out_documents_are_never_trained_on(tmp_path):
    settings = recipe(data={"held_out": 0.2})
    train = texts(everything(build(settings, forty(), tmp_path)))
    evaluation = build(settings, forty(), tmp_path, split="evaluation")
    held_out = texts(everything(evaluation))
    assert len(held_out) == 8 and sorted(train + held_out) == [f"{number:03d}" for number in range(40)]
    evaluation.reset()
    assert texts(everything(evaluation)) == held_out
    assert texts(everything(build(recipe(data={"held_out": 0.2}, seed=5), forty(), tmp_path, split="evaluation"))) == held_out
    longer = recipe(data={"held_out": 0.2}, sequence_length=64)
    assert sorted(texts(everything(build(longer, forty(), tmp_path, split="evaluation")))) == sorted(held_out), (
        "whatever the length of rows"
    )
    with pytest.raises(UsageError, match="nothing to evaluate on"):
        build(recipe(), forty(), tmp_path, split="evaluation")


# ------------------------------------------------------------ the model


def test_a_processor_of_another_model_is_refused(tmp_path):
    made = PatchProcessor(SMALL, tokenizer())
    vision = types.SimpleNamespace(patch=4, temporal_patch=2, merge=2, channels=3)
    check_model(made, types.SimpleNamespace(image_id=264, video_id=265, vision_start_id=266, vision_end_id=267, vision=vision))
    check_model(made, types.SimpleNamespace(vision=None))
    model = types.SimpleNamespace(image_id=151655, vision=types.SimpleNamespace(patch=16, merge=2))
    with pytest.raises(UsageError, match=r"model.image_id is 151655, and .* the id 264; model.vision.patch is 16, and the processor's 4"):
        build(recipe(model=model), forty(), tmp_path)


def test_media_are_not_shown_to_a_model_that_does_not_see(tmp_path):
    """It would be trained on placeholders, and nothing would say so."""
    arguments = (0, 1, tmp_path)
    seeing, blind = types.SimpleNamespace(vision=types.SimpleNamespace()), types.SimpleNamespace()
    text = [Document(text="what is there to see?")]
    for model in (blind, types.SimpleNamespace(vision=None)):
        settings = recipe(model=model, data={"held_out": 0.5})
        for split in ("train", "evaluation"):
            with pytest.raises(
                UsageError, match=r"data.mixture.0.source \(listed\): there are images or videos .* no vision tower \(model.vision\)"
            ):
                entry(settings.data.loader, settings, forty(), *arguments, split)
        assert not entry(settings.data.loader, settings, Doubles(Listed(text * 8)), *arguments, "train").shown()
    settings = recipe(model=seeing)
    assert entry(settings.data.loader, settings, forty(), *arguments, "train").shown() == ["data.mixture.0.source (listed)"]
    mixed = recipe(2, model=blind)
    with pytest.raises(UsageError, match=r"^data.mixture.1.source \(listed\): there are images"):
        entry(mixed.data.loader, mixed, Doubles(Listed(text), Listed([document(0)])), *arguments, "train")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"too_long": "cut"}, "truncate, skip, stop|skip, stop, truncate"),
        ({"bad_media": "skp"}, "Did you mean 'skip'"),
        ({"workers": -1}, "data.loader.workers is -1; it must be finite and at least 0"),
        ({"worker_timeout_s": float("nan")}, "data.loader.worker_timeout_s is nan; it must be finite"),
        ({"patches": 0}, "data.loader.patches is 0"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(UsageError, match=words):
        MultimodalConfig(processor=SMALL, **settings)


# ------------------------------------------------------------ workers


def whole_recipe(source, workers, prefetch=0, **settings):
    """A recipe that another process can build."""
    base = debug()
    loader = MultimodalConfig(processor=SMALL, workers=workers, patches=1024, **settings)
    data = DataConfig(
        loader=loader,
        tokenizer=ByteTokenizerConfig(specials=SPECIALS),
        mixture=(MixturePart(source=source),),
        held_out=0.0,
        prefetch=prefetch,
        epochs=1,
    )
    return chz.replace(base, data=data, train=chz.replace(base.train, sequence_length=128, micro_batch=2, global_batch=4))


def test_the_order_is_the_same_whatever_the_number_of_workers_and_how_far_ahead_they_are(tmp_path):
    found = []
    for workers, prefetch in ((0, 0), (0, 3), (1, 0), (3, 2)):
        settings = whole_recipe(DrawnConfig(documents=60), workers, prefetch)
        loader = build(settings, current(), tmp_path / f"{workers} {prefetch}")
        found.append((everything(loader), loader.facts()["sources"][0]["digest"]))
        loader.close()
    assert len(found[0][0]) > 8
    for batches, digest in found[1:]:
        assert equal(batches, found[0][0]) and digest == found[0][1]


def jsonl(folder, *images):
    """A source of one document for each image's bytes."""
    lines = []
    for number, data in enumerate(images):
        (folder / f"{number}.png").write_bytes(data)
        lines.append(json.dumps({"images": [f"{number}.png"], "text": f"{number:03d}"}) + "\n")
    (folder / "data.jsonl").write_text("".join(lines))
    return MediaJsonlConfig(paths=(str(folder / "data.jsonl"),))


def test_workers_tell_the_same_of_bad_media(tmp_path):
    good, whole = encoded(noise(16, 16)), encoded(smooth(60, 60))
    source = jsonl(tmp_path, good, whole[: len(whole) // 2], b"", good)
    loader = build(whole_recipe(source, 1, bad_media="skip"), current(), tmp_path)
    batches = everything(loader)
    loader.close()
    assert sorted(texts(batches)) == ["000", "003"]
    assert loader.facts()["bad_media"] == 1 and "2.png: the file is empty" in loader.facts()["sources"][0]["bad_media_first"][0]
    (what,) = (what for batch in batches for what in batch.extra["bad_media"])
    assert "document 1: image" in what and "truncated" in what
    with pytest.raises(MediaError, match=r"document 2 has a medium that cannot be used: .*2\.png: the file is empty"):
        build(whole_recipe(source, 1), current(), tmp_path / "again")


def test_a_worker_that_dies_is_told(tmp_path):
    loader = build(whole_recipe(DrawnConfig(documents=60), 1, prefetch=1), current(), tmp_path)
    loader.next_step()
    (process,) = loader._workers().processes
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(PluginError, match=r"Worker 0 \(process \d+\) was ended by signal 9; it had documents .* to read.*out of memory"):
        everything(loader)
    assert loader._pool_of_workers is None, "the loader is closed, and no process is left"
    assert process.poll() is not None
    assert texts(loader.next_step()), "it starts anew where it is asked again"
    loader.close()


def test_a_worker_that_hangs_is_told_and_jobs_wait_in_a_bounded_queue(tmp_path):
    loader = build(whole_recipe(DrawnConfig(documents=60), 1), current(), tmp_path)
    loader.next_step()
    pool = loader._workers()
    (process,) = pool.processes
    os.kill(process.pid, signal.SIGSTOP)
    job = {"pieces": loader._pieces(0)}
    futures = [pool.submit(job)]
    while not pool._jobs.empty():  # the first one is the worker's
        threading.Event().wait(0.01)
    futures += [pool.submit(job) for _ in range(2)]
    held_up = threading.Thread(target=lambda: futures.append(pool.submit(job)), daemon=True)
    held_up.start()
    held_up.join(0.5)
    assert held_up.is_alive() and len(futures) == 3, "there is no room for it"
    os.kill(process.pid, signal.SIGCONT)
    held_up.join(600)
    assert all(
        torch.equal(torch.from_numpy(future.result(600)[1].tokens_S), torch.from_numpy(futures[0].result(600)[1].tokens_S))
        for future in futures
    )
    os.kill(process.pid, signal.SIGSTOP)
    pool._timeout_s = 0.2
    with pytest.raises(PluginError, match=r"has not answered for 0.2 s; it had documents .*Raise data.loader.worker_timeout_s"):
        loader.next_step()
    loader.close()


def test_a_worker_that_hangs_within_its_answer_is_told_too():
    """Wherever it stops: before the length, within the head, between arrays, within one."""
    row = RowMaker([], [], PatchProcessor(SMALL, tokenizer()), 32, 0, None, "stop").make([])
    reading, writing = os.pipe()
    wire.send(writing, {"a": 1}, row)
    whole = os.read(reading, 1 << 16)
    for size in (1, 8, 20, len(whole) - 32 * 8, len(whole) - 1):
        os.write(writing, whole[:size])
        with pytest.raises(TimeoutError):
            wire.receive(reading, 0.01)
        os.set_blocking(reading, False)  # what is left of it
        with contextlib.suppress(BlockingIOError):
            os.read(reading, 1 << 16)
        os.set_blocking(reading, True)
    os.write(writing, whole)
    message, found = wire.receive(reading, 1e12)  # longer than the system knows how to wait
    assert message == {"a": 1} and found.lengths == row.lengths and (found.tokens_S == row.tokens_S).all()
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_workers_end_with_who_started_them(tmp_path):
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        settings = whole_recipe(DrawnConfig(documents=20), 1)
        wire.send(process.stdin.fileno(), {"recipe": flatten(settings, current()), "directory": str(tmp_path), "split": "train"})
        assert wire.receive(process.stdout.fileno()) == ({}, None)
        process.stdin.close()  # as the system does when the starter ends, however it ends
        assert process.wait(600) == 0


def test_workers_import_no_torch():
    code = "import sys; import intarsia_multimodal.worker, intarsia_multimodal.patches, intarsia_multimodal.drawn; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0
