"""Sources with media: JSON lines, folders, and questions on drawn images."""

from __future__ import annotations

import base64
import collections
import io
import json
import os

import chz
import numpy
import pytest
import torch
from intarsia.contracts import IGNORE, Batch, Document, Media, Message, ToolCall, ToolSpec
from intarsia.errors import UsageError
from intarsia_multimodal.config import QUESTIONS, DrawnConfig, MediaFolderConfig, MediaJsonlConfig
from intarsia_multimodal.contracts import MediaError
from intarsia_multimodal.drawing import draw
from intarsia_multimodal.drawn import DrawnSource
from intarsia_multimodal.exam import grade, questions, right_documents
from intarsia_multimodal.patches import PatchProcessor
from intarsia_multimodal.scenes import ANSWERS, FONTS
from intarsia_multimodal.sources import MediaFolderSource, MediaJsonlSource
from intarsia_testing.data_source import DataSourceConformance
from PIL import Image

from tests.support.media import SMALL, encoded, noise, smooth, tokenizer

PNG = encoded(noise(16, 16))
INLINE = base64.b64encode(PNG).decode()


def write(folder, *records):
    """A JSONL file of records, beside an image `a.png`."""
    (folder / "a.png").write_bytes(PNG)
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return MediaJsonlConfig(paths=(str(folder / "data.jsonl"),))


def first(folder, record, **settings):
    return MediaJsonlSource(chz.replace(write(folder, record), **settings))[0]


# ------------------------------------------------------------ JSON lines


def test_every_way_to_write_a_document(tmp_path):
    path = str((tmp_path / "a.png").resolve())
    config = write(
        tmp_path,
        {"text": "plain"},
        {"images": ["a.png"], "text": "behind"},
        {"parts": ["one ", {"image": "a.png"}, {"type": "text", "text": " two"}, {"type": "image", "image": {"base64": INLINE}}]},
        {"parts": [{"image": f"data:image/png;base64,{INLINE}"}, {"video": ["a.png", {"base64": INLINE}]}, {"video": "v.mp4"}]},
        {"messages": [{"role": "user", "content": [{"image": path}, "what?"]}, {"role": "assistant", "content": "that", "trained": False}]},
        {"text": "with the rest ", "videos": ["v.mp4"], "parts": None},
        {"parts": ["all"], "images": [], "tools": None},
    )
    source = MediaJsonlSource(config)
    image, inline, movie = Media("image", path), Media("image", PNG), Media("video", str(tmp_path.resolve() / "v.mp4"))
    assert [source[number] for number in range(len(source))] == [
        Document(parts=("plain",)),
        Document(parts=(image, "behind")),
        Document(parts=("one ", image, " two", inline)),
        Document(parts=(inline, Media("video", (PNG, PNG)), movie)),
        Document(messages=(Message("user", (image, "what?")), Message("assistant", "that", False))),
        Document(parts=(movie, "with the rest ")),
        Document(parts=("all",)),
    ]


def test_media_lie_below_the_roots(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
    (outside / "b.png").write_bytes(PNG)
    for reference in (str(outside / "b.png"), "../outside/b.png", "/etc/passwd"):
        with pytest.raises(
            MediaError, match=r"data.jsonl:1: images\[0\] names .*, which lies outside .*inside\. Name its folder in roots to allow it"
        ):
            first(inside, {"images": [reference], "text": ""})
    (inside / "link.png").symlink_to(outside / "b.png")
    with pytest.raises(MediaError, match="lies outside"):
        first(inside, {"images": ["link.png"], "text": ""})
    for reference in (str(outside / "b.png"), "b.png"):
        document = first(inside, {"images": [reference], "text": ""}, roots=(str(outside),))
        assert document.parts[0].data == str((outside / "b.png").resolve())
    with pytest.raises(UsageError, match=r"roots names .*nowhere, which is no folder"):
        first(inside, {"text": ""}, roots=(str(tmp_path / "nowhere"),))


@pytest.mark.parametrize(
    ("record", "kind", "words"),
    [
        ([], UsageError, "expected an object with named fields, found list"),
        ({"txt": "a"}, UsageError, "one of the fields text, parts, messages; this one has 'txt'"),
        ({"text": "a", "parts": []}, UsageError, "this one has text and parts"),
        ({"parts": "a"}, UsageError, "parts must be a list, not str"),
        ({"parts": [1]}, UsageError, r"parts\[0\] holds int"),
        ({"parts": [{"imge": "a.png"}]}, UsageError, "Did you mean 'image'"),
        ({"parts": [{"type": "text", "image": "a.png"}]}, UsageError, "has the fields 'type', 'image'"),
        ({"parts": [{"image": 3}]}, UsageError, "must be a path, .* not int"),
        ({"parts": [{"image": {"base64": "%%%"}}]}, MediaError, "is not valid base64"),
        ({"parts": [{"image": "data:image/png,abc"}]}, MediaError, "only data:...;base64, is read"),
        ({"parts": [{"video": ["none.png"]}]}, MediaError, "none.png: it cannot be read"),
        ({"parts": [{"video": ["http://x/y.png"]}]}, MediaError, "frame is named by an URL"),
        ({"text": "\ud800"}, UsageError, r"lone surrogate \(.*\) as its character 0"),
        ({"messages": [{"role": "user"}]}, UsageError, r"messages\[0\] must be an object with role and content"),
        ({"messages": [{"role": "user", "content": "a", "trained": 1}]}, UsageError, "trained must be true, false or absent"),
        ({"image": "a.png", "text": "a"}, UsageError, "it has the field 'image', which is not read there, .* Did you mean 'images'"),
        ({"images": ["a.png"], "messages": []}, UsageError, "it has the field 'images', which is not read there, .*beside `messages`"),
        ({"videos": ["a.mp4"], "parts": []}, UsageError, "it has the field 'videos', which is not read there, .*beside `parts`"),
        ({"messages": [{"role": "user", "content": "a", "images": ["a.png"]}]}, UsageError, r"messages\[0\] has the field 'images', which"),
        ({"text": "a", "tools": [{"name": "f"}]}, UsageError, "it has the field 'tools', which is not read there"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": 1}]}]},
            UsageError,
            r"tool_calls\[0\] must have a name",
        ),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, UsageError, r"tools\[0\] must have a name"),
        ({"images": ["a\0.png"], "text": ""}, MediaError, r"images\[0\] names 'a.x00.png', which is no path: embedded null byte"),
        ({"images": ["\ud800.png"], "text": ""}, MediaError, "which is no path: .*surrogates not allowed"),
        ({"images": ["a" * 5000], "text": ""}, MediaError, r"images\[0\] names 'aaa.*, which is no path: File name too long"),
        ({"parts": [{"video": ["b" * 300]}]}, MediaError, "which is no path: File name too long"),
        ({"parts": [{"video": ["."]}]}, MediaError, "it cannot be read: it is no file"),
    ],
)
def test_records_that_are_no_documents(tmp_path, record, kind, words):
    with pytest.raises(UsageError, match=rf"data.jsonl:1: .*{words}") as found:
        first(tmp_path, record)
    assert type(found.value) is kind, "what is wrong with a medium may be skipped, what is wrong with a record may not"


def test_lines_that_nest_too_deeply_are_no_json(tmp_path):
    config = write(tmp_path)
    (tmp_path / "data.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(UsageError, match=r"data.jsonl:1: not valid JSON: it is nested too deeply"):
        MediaJsonlSource(config)[0]


def test_conversations_have_tools_and_calls(tmp_path):
    record = {
        "messages": [
            {"role": "user", "content": [{"image": "a.png"}, "Which?"]},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "zoom", "arguments": {"by": 2}}]},
            {"role": "tool", "content": [{"image": "a.png"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "zoom", "description": "Zooms."}}],
    }
    document = first(tmp_path, record)
    assert document.messages[1] == Message("assistant", "", tool_calls=(ToolCall("call-1", "zoom", '{"by": 2}'),))
    assert document.tools == (ToolSpec("zoom", "Zooms.", {}),)


def test_names_that_are_not_utf_8(tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff"
    for ending, content in ((b".png", PNG), (b".txt", b"caption")):
        with open(name + ending, "wb") as file:
            file.write(content)
    source = MediaFolderSource(MediaFolderConfig(paths=(f"{tmp_path}/*.png",)))
    assert source.fingerprint() == source.fingerprint() and source[0].parts[1] == "caption"


def test_urls_are_left_to_the_processor(tmp_path):
    assert first(tmp_path, {"images": ["https://example.org/a.png"], "text": ""}).parts[0].data == "https://example.org/a.png"


class TestMediaJsonl(DataSourceConformance):
    entry = "intarsia-multimodal:media_jsonl"

    def config(self, folder):
        return write(folder, *({"images": ["a.png"], "text": f"image {number}"} for number in range(5)))

    def changed(self, folder):
        return write(folder, *({"images": ["a.png"], "text": f"image {number}"} for number in range(6)))

    def broken(self, folder):
        return write(folder, {"parts": [{"picture": "a.png"}]})


class TestMediaFolder(DataSourceConformance):
    entry = "intarsia-multimodal:media_folder"

    def config(self, folder):
        for number in range(3):
            (folder / f"{number}.png").write_bytes(encoded(smooth(16, 16, number)))
            (folder / f"{number}.txt").write_text(f"image {number}\n")
        return MediaFolderConfig(paths=(f"{folder}/*",))

    def changed(self, folder):
        (folder / "1.txt").write_text("another caption")
        return MediaFolderConfig(paths=(f"{folder}/*",))

    def broken(self, folder):
        (folder / "alone.png").write_bytes(PNG)
        return MediaFolderConfig(paths=(f"{folder}/*",))


def test_folders_of_captioned_media(tmp_path):
    config = TestMediaFolder().config(tmp_path)
    medium = Media("image", str(tmp_path / "1.png"))
    assert MediaFolderSource(config)[1] == Document(parts=(medium, "image 1"))
    asked = MediaFolderSource(chz.replace(config, prompt="Describe it."))[1]
    assert asked.messages == (Message("user", (medium, "Describe it.")), Message("assistant", "image 1"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("x")
    with pytest.raises(UsageError, match="match 1 files, none of them an image or video"):
        MediaFolderSource(MediaFolderConfig(paths=(f"{tmp_path}/text/*",)))


# ------------------------------------------------------------ drawn images


class TestDrawn(DataSourceConformance):
    entry = "intarsia-multimodal:drawn"

    def config(self, folder):
        return DrawnConfig(documents=30, questions=QUESTIONS)

    def changed(self, folder):
        return DrawnConfig(documents=30, questions=QUESTIONS, noise=0)


def test_answers_take_turns_so_that_chance_is_at_most_a_quarter():
    for kinds in (QUESTIONS, *((kind,) for kind in QUESTIONS)):
        source = DrawnSource(DrawnConfig(documents=len(kinds) * 40, questions=kinds))
        given = collections.defaultdict(collections.Counter)
        for number in range(len(source)):
            messages = source.outline(number).messages
            given[source.kind_of(number)][messages[1].content] += 1
        for kind, counts in given.items():
            assert set(counts) == set(ANSWERS[kind]) and set(counts.values()) == {40 // len(ANSWERS[kind])}
        assert source.chance() <= 0.25


def test_no_scene_is_in_both_parts_whatever_the_seeds():
    seen = {}
    for part in ("train", "held_out"):
        sources = [DrawnSource(DrawnConfig(documents=300, part=part, seed=seed, questions=QUESTIONS)) for seed in (0, 1)]
        seen[part] = {(found.items, found.background) for source in sources for found in map(source.scene, range(300))}
    assert len(seen["train"]) > 500 and not seen["train"] & seen["held_out"]


def test_pictures_show_what_the_answers_say():
    source = DrawnSource(DrawnConfig(documents=240, questions=QUESTIONS, noise=0, size=48))
    fonts = set()
    for number in range(240):
        scene = source.scene(number)
        levels = numpy.asarray(draw(scene, 48, 0, 0)).astype(int)
        lit = numpy.abs(levels - scene.background).max(axis=2) > 60
        assert lit.any() and not lit.all()
        for item in scene.items:
            half = max(1, item.width // 4) if not item.font else item.width // 2
            box = [slice((place - half) * 2, (place + half) * 2 + 1) for place in (item.y, item.x)]
            assert lit[tuple(box)].any(), scene
            fonts.add(item.font)
        if scene.question == "What colour is it?":
            strongest = levels[lit].mean(axis=0)
            expected = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}[scene.answer]
            assert tuple((strongest > 150).astype(int)) == expected
        if scene.question == "How many shapes are there?":
            assert len(scene.items) == int(scene.answer) == len({(item.x, item.y) for item in scene.items})
    assert fonts == {"", *FONTS}


def test_an_outline_has_the_same_tokens_as_the_document():
    source, made = DrawnSource(DrawnConfig(documents=12, questions=QUESTIONS)), PatchProcessor(SMALL, tokenizer())
    for number in range(12):
        whole, outline = made.prepare(source[number]), made.prepare(source.outline(number))
        assert numpy.array_equal(whole.tokens_N, outline.tokens_N)
        assert [slot.grid for slot in whole.media] == [slot.grid for slot in outline.media] == [(1, 8, 8)]
        picture = Image.open(io.BytesIO(source[number].messages[0].content[0].data))
        assert picture.size == (32, 32) and picture.mode == "RGB"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"part": "trian"}, "Did you mean 'train'"),
        ({"questions": ("colors",)}, "Did you mean 'colour'"),
        ({"questions": ()}, "must name at least one kind"),
        ({"size": 8}, "drawn.size is 8; it must be between 24 and 1024"),
        ({"documents": 0}, "drawn.documents is 0"),
    ],
)
def test_settings_of_drawn_are_checked(settings, words):
    with pytest.raises(UsageError, match=words):
        DrawnConfig(**settings)


# ------------------------------------------------------------ exams


def test_answers_are_graded():
    source = DrawnSource(DrawnConfig(documents=40, part="held_out"))
    asked = questions(source, range(40))
    assert [len(each.prompt) for each in asked] == [1] * 40 and {each.kind for each in asked} == {"shape", "colour", "count", "digit"}
    assert grade(asked, [f" {each.answer.upper()}.\n" for each in asked]).accuracy == 1.0
    score = grade(asked, ["circle"] * 40)
    assert score.by_kind["shape"] == (3, 10) and (score.right, score.total) == (3, 40)
    with pytest.raises(UsageError, match="40 questions and 1 answers"):
        grade(asked, ["a"])
    with pytest.raises(UsageError, match="document 0 is no conversation"):
        questions([Document(text="a")], [0])


def test_predictions_are_graded_by_document():
    labels = torch.tensor([[IGNORE, 1, 2, IGNORE, 3, IGNORE], [IGNORE, 4, 5, 6, IGNORE, IGNORE]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    empty = torch.zeros_like(labels)
    batch = Batch(empty, labels, empty, documents, ((3, 2, 1), (3, 3)))
    assert right_documents(batch, labels) == (4, 4), "documents without labels do not count"
    predicted = labels.clone()
    predicted[0, 2] = predicted[1, 0] = 9
    assert right_documents(batch, predicted) == (3, 4), "what has no label may be predicted as it likes"
    assert right_documents(batch, empty) == (0, 4)
