"""`intarsia generate` with images, as a user calls it, in this process, on a run of one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from intarsia.cli import main
from intarsia_console.events import read_events
from intarsia_multimodal.config import DrawnConfig
from intarsia_multimodal.drawn import DrawnSource

SMALL = ("train.steps=1", "train.sequence_length=96", "evaluation.every=0", "checkpoint.every=1", "data.mixture.0.source.documents=20")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("seeing")
    settings = (*SMALL, "data.loader.workers=0", f"data.cache={place / 'cache'}")
    assert main(["train", "qwen3_vl/debug", "--dir", str(place / "run"), *settings, "--quiet"]) == 0
    return place / "run"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    source, place = DrawnSource(DrawnConfig(documents=4)), tmp_path_factory.mktemp("pictures")
    for number in range(2):
        messages: Any = source[number].messages
        (place / f"{number}.png").write_bytes(messages[0].content[0].data)
    return [str(place / f"{number}.png") for number in range(2)]


def test_images_are_shown_and_recorded(run, pictures, capsys):
    def answers(*arguments: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        code = main(["generate", str(run), "--max-tokens", "4", "--ignore-eos", "--json", *arguments])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return json.loads(captured.out)["completions"]

    shown = [part for picture in pictures for part in ("--image", picture)]
    two = answers("--chat", "--greedy", *shown, "--prompt", "What?", "--prompt", "Where is it?")
    assert [each["prompt"] for each in two] == ["What?", "Where is it?"]
    one = answers("--chat", "--greedy", *shown[:2], "--prompt", "What?")
    # A start, 4 features of 32 x 32 pixels in patches of 8, two by two, and an end more.
    assert len(two[0]["prompt_tokens"]) == len(one[0]["prompt_tokens"]) + 6 and two[0]["prompt_tokens"].count(266) == 8
    plain = answers("--greedy", *shown[2:], "--prompt", "What?")
    assert plain[0]["prompt_tokens"][:2] == [256, 264] and bytes(plain[0]["prompt_tokens"][-5:]) == b"What?"
    *_, event = [each for each in read_events(run) if each["event"] == "generate"]
    assert event["media"] == [pictures[1]] and event["prompt"] == "What?"
    answers("--prompt", "a")
    *_, event = [each for each in read_events(run) if each["event"] == "generate"]
    assert "media" not in event


def test_the_processor_that_a_run_has_keeps_its_settings_where_it_is_named(run, pictures, capsys):
    capsys.readouterr()
    given = ["--prompt", "x", "--image", pictures[0], "--max-tokens", "3", "--greedy"]
    written = []
    for named in ([], ["--processor", "patches"]):
        assert main(["generate", str(run), *given, *named]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1] != ""


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("--image", "nowhere.png"), "--image nowhere.png: there is no such file"),
        (("--image", "."), "--image .: it is no file"),
        (("--image", "https://example.com/a.png"), "--image https://example.com/a.png: an URL is not fetched. Download it"),
        (("--video", ""), "--video: its file is named by an empty text"),
        (("--video", __file__), "or no video of a format that is read (mov, mp4"),
        (("--image", __file__), "it is no image of a format that is read"),
        (("--image", "PICTURE", "--processor", "patchs"), "Did you mean 'patches'?"),
    ],
)
def test_what_cannot_be_shown(run, pictures, capsys, arguments, words):
    capsys.readouterr()
    given = [pictures[0] if each == "PICTURE" else each for each in arguments]
    assert main(["generate", str(run), "--prompt", "x", *given]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""
