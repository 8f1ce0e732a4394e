"""Equal media are decoded once, within a bound, whoever asks; what goes wrong is told to all who wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import chz
import numpy
import pytest
import torch
from intarsia.config import DataSourceConfig, MixturePart
from intarsia.contracts import Document, Media
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_data.config import ByteTokenizerConfig
from intarsia_llama3.recipes import debug
from intarsia_multimodal import loader as loading
from intarsia_multimodal.config import DrawnConfig, MediaJsonlConfig, MultimodalConfig
from intarsia_multimodal.contracts import MediaError, Slot
from intarsia_multimodal.decoding import Decoder
from intarsia_multimodal.loader import MultimodalLoader
from intarsia_multimodal.making import Piece, RowMaker
from intarsia_multimodal.patches import PatchProcessor
from intarsia_multimodal.pool import Pool

from tests.support.media import SMALL, SPECIALS, encoded, image, noise, tokenizer

PROCESSOR = PatchProcessor(SMALL, tokenizer())


class Counting:
    """The processor, with what it was asked for; `before` is called first."""

    patch_values = PROCESSOR.patch_values

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.asked: list[Media] = []
        self.before = before

    def load(self, slot: Slot) -> numpy.ndarray:
        self.asked.append(slot.media)
        self.before()
        return PROCESSOR.load(slot)


def slot_of(medium: Media) -> Slot:
    (slot,) = PROCESSOR.prepare(Document(parts=(medium,))).media
    return slot


def decoder(counting: Any, limit: int = 1 << 20) -> Decoder:
    return Decoder(counting, limit)


def test_media_are_equal_by_their_contents(tmp_path: Path) -> None:
    """A file and its bytes; not another image, nor the same frames as a video, nor a file that was written anew."""
    asked = Counting()
    made = decoder(asked)
    one, file = image(16, 24), tmp_path / "one.png"
    assert isinstance(one.data, bytes)
    file.write_bytes(one.data)
    first = made.load(slot_of(one))
    assert (
        made.load(slot_of(Media("image", bytes(bytearray(one.data))))) is first and made.load(slot_of(Media("image", str(file)))) is first
    )
    assert numpy.array_equal(first.patches_NC, PROCESSOR.load(slot_of(one))) and (made.decoded, made.spared) == (1, 2)
    other = made.load(slot_of(image(16, 24, 1)))
    assert other.digest != first.digest
    file.write_bytes(encoded(noise(16, 24, 7)))
    assert not numpy.array_equal(made.load(slot_of(Media("image", str(file)))).patches_NC, first.patches_NC)
    frames = encoded(noise(16, 24)), encoded(noise(16, 24, 1))
    videos = [made.load(slot_of(Media("video", each))) for each in (frames, frames[::-1], frames)]
    assert videos[0] is videos[2] and videos[0].digest != videos[1].digest
    assert made.decoded == len(asked.asked) == 5


def test_what_is_kept_is_bounded_and_what_somebody_has_is_found() -> None:
    slots = [slot_of(image(16, 16, number)) for number in range(4)]
    size = PROCESSOR.load(slots[0]).nbytes
    made = decoder(Counting(), 2 * size)
    held = made.load(slots[0])
    for slot in slots[1:]:
        made.load(slot)
    assert made.load(slots[0]) is held, "it is no longer kept, and somebody has it"
    made.load(slots[3])
    assert (made.decoded, made.spared) == (4, 2)
    made.load(slots[1])
    assert made.decoded == 5, "nobody has it, and later ones were kept instead"
    small = decoder(Counting(), 1)
    small.load(slots[0])
    small.load(slots[0])
    assert (small.decoded, small.spared) == (1, 1), "the last one is kept, however large"


def test_threads_that_ask_at_once_decode_once() -> None:
    """And are told the same error."""
    many, slot = 4, slot_of(image(16, 16))
    counting = Counting()
    made = decoder(counting)

    def held() -> None:
        while made.spared < many - 1:  # the others have come, and wait for this one
            threading.Event().wait(0.001)

    counting.before = held
    with ThreadPoolExecutor(many) as threads:
        found = list(threads.map(lambda _: made.load(slot), range(many)))
    assert all(each is found[0] for each in found) and made.decoded == 1
    cut = slot_of(image(16, 24))
    assert isinstance(cut.media.data, bytes)
    broken = Slot(Media("image", cut.media.data[: len(cut.media.data) // 2]), cut.at, cut.stop, cut.spans, cut.grid, cut.frames, cut.size)
    many = made.spared + 4

    def ask(_: int) -> str:
        with pytest.raises(MediaError) as caught:
            made.load(broken)
        return str(caught.value)

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(ask, range(4)))) == 1
    assert made.decoded == 2


def test_what_is_no_file_is_asked_for_each_time(tmp_path: Path) -> None:
    """An URL, whose contents are not known; a file that is gone is the processor's error."""
    slot = slot_of(image(16, 16))
    made = decoder(Counting())
    for data in ("http://127.0.0.1:9/one.png", str(tmp_path / "gone.png"), str(tmp_path)):
        elsewhere = Slot(Media("image", data), slot.at, slot.stop, slot.spans, slot.grid, slot.frames, slot.size)
        for _ in range(2):
            with pytest.raises(MediaError):
                made.load(elsewhere)
    assert made.decoded == 6 and made.spared == 0


def test_a_file_that_is_written_anew_while_it_is_decoded_is_taken_for_nothing_else(tmp_path: Path) -> None:
    one, another = image(16, 24), image(16, 24, 1)
    assert isinstance(one.data, bytes) and isinstance(another.data, bytes)
    file, other_data = tmp_path / "screen.png", another.data
    file.write_bytes(one.data)
    slot = slot_of(Media("image", str(file)))
    made = decoder(Counting(lambda: file.write_bytes(other_data)))
    taken = made.load(slot)
    expected = PROCESSOR.load(slot_of(one))
    assert not numpy.array_equal(taken.patches_NC, expected)
    assert numpy.array_equal(made.load(slot_of(one)).patches_NC, expected)


def test_rows_that_show_the_same_decode_it_once() -> None:
    """Several questions on one image, in one row and in the next."""
    documents = [Document(parts=(image(16, 16), f"question {number}")) for number in range(4)]
    maker = RowMaker([documents], ["asked"], PROCESSOR, 64, 0, None, "stop")
    pieces = [Piece(0, number, len(PROCESSOR.prepare(each).tokens_N), 16) for number, each in enumerate(documents)]
    rows = [maker.make(pieces[:2]), maker.make(pieces[2:])]
    assert all(row.grids == ((1, 4, 4),) * 2 and numpy.array_equal(row.patches_NC[:16], rows[0].patches_NC[16:]) for row in rows)
    assert (maker.decoder.decoded, maker.decoder.spared) == (1, 3)


def drawn(folder: Path, workers: int, policy: str = "stop", prefetch: int = 0) -> MultimodalLoader:
    return loader_of(DrawnConfig(documents=64), folder, workers, policy, prefetch)


def loader_of(
    source: DataSourceConfig, folder: Path, workers: int, policy: str = "stop", prefetch: int = 0, too_long: str = "truncate"
) -> MultimodalLoader:
    """Steps of four micro-batches."""
    run = debug()
    loader = MultimodalConfig(processor=SMALL, workers=workers, bad_media=policy, too_long=too_long)
    mixture = (MixturePart(source=source),)
    data = chz.replace(
        run.data,
        loader=loader,
        mixture=mixture,
        tokenizer=ByteTokenizerConfig(specials=SPECIALS),
        held_out=0.0,
        prefetch=prefetch,
        cache=str(folder),
    )
    run = chz.replace(run, data=data, train=chz.replace(run.train, sequence_length=128, micro_batch=1, global_batch=4))
    return MultimodalLoader(loader, run, current(), 0, 1, folder, "train")


def test_a_step_is_decoded_by_micro_batch_and_not_at_all_where_nobody_looks(tmp_path: Path) -> None:
    """What cannot be decoded, and is left out, is looked for before the step begins: by all ranks, since the last stage of a pipeline must know."""
    looking, leaving_out = drawn(tmp_path, 0), drawn(tmp_path, 0, "skip")
    batches, others = looking.next_step(), leaving_out.next_step()
    assert batches is not None and others is not None and len(batches) == 4
    decoders = [loader._maker.rows.decoder for loader in (looking, leaving_out)]
    shown = [len(batch.extra["grids"]) for batch in batches]
    assert [each.decoded + each.spared for each in decoders] == [0, sum(shown)] and min(shown) > 0
    for number, (batch, other) in enumerate(zip(batches, others, strict=True), 1):
        patches_NC = batch.extra["patches_NC"]()
        assert decoders[0].decoded + decoders[0].spared == sum(shown[:number])
        assert torch.equal(patches_NC, other.extra["patches_NC"]())
        assert torch.equal(batch.extra["visual_BS"], other.extra["visual_BS"]) and torch.equal(batch.labels_BS, other.labels_BS)


def test_workers_decode_a_little_ahead_of_who_looks(tmp_path: Path) -> None:
    """The next micro-batches, of the next step too, where there is one; and a micro-batch may be looked at again."""
    loader, here = drawn(tmp_path, 1, prefetch=1), drawn(tmp_path, 0)
    expected = [batch.extra["patches_NC"]() for _ in range(2) for batch in here.next_step() or ()]
    first = [batch.extra["patches_NC"] for batch in loader.next_step() or ()]
    assert [each._begun is None for each in first] == [True] * 4, "nobody has looked"
    assert torch.equal(first[0](), expected[0]) and [each._begun is None for each in first] == [True, False, False, True]
    wait([loader._pending[0]])
    found = [first[0](), *(each() for each in first[1:])]
    second = [batch.extra["patches_NC"] for batch in loader.next_step() or ()]
    assert [each._begun is None for each in second] == [False, False, True, True]
    found += [each() for each in second]
    assert len(found) == len(expected) and all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    loader.close()


REFUSED: dict[str, tuple[str, type[Exception], str]] = {
    "a medium": ('{"images": ["gone.png"], "text": "none"}\n', MediaError, r"gone\.png"),
    "a length": (f'{{"text": "{"long " * 50}"}}\n', UsageError, "1 documents are too long"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_loader_that_is_refused_leaves_no_worker(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While documents are prepared, and once they are."""
    made: list[Pool] = []

    class Noted(Pool):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(loading, "Pool", Noted)
    text, error, match = REFUSED[why]
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(error, match=match):
        loader_of(MediaJsonlConfig(paths=(str(tmp_path / "data.jsonl"),)), tmp_path, 1, too_long="stop")
    assert [process.poll() is None for pool in made for process in pool.processes] == [False]


def test_features_are_numbered_in_one_place() -> None:
    """Of all media in order, from any number on; a cut leaves out those that it cuts off."""
    prepared = PROCESSOR.prepare(Document(parts=("a", image(16, 16), "b", Media("video", (encoded(noise(16, 16)),) * 4), "c")))
    numbers = prepared.visual(10)
    assert numbers[numbers >= 0].tolist() == list(range(10, 10 + prepared.features)) and prepared.features > 4
    ids = {PROCESSOR.ids["image_id"], PROCESSOR.ids["video_id"]}
    assert [number >= 0 for number in numbers] == [token in ids for token in prepared.tokens_N.tolist()]
    first, second = prepared.media
    short = prepared.cut(second.at)
    assert short.features == first.features and (short.visual() >= 0).sum() == first.features
