"""What the page on images and video shows works as it stands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from intarsia.cli import main
from intarsia.contracts import Media
from intarsia_multimodal.config import MediaJsonlConfig
from intarsia_multimodal.sources import MediaJsonlSource

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "multimodal-data.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("line", [line for block in blocks("console") for line in block.splitlines()])
def test_commands_run(line, capsys):
    program, *words = shlex.split(line)
    assert program == "intarsia" and main(words) == 0
    assert "What colour is it?>" in capsys.readouterr().out


def test_lines_of_json_are_documents(tmp_path):
    (block,) = blocks("json")
    (tmp_path / "data.jsonl").write_text(block)
    source = MediaJsonlSource(MediaJsonlConfig(paths=(f"{tmp_path}/data.jsonl",)))
    documents = [source[number] for number in range(len(source))]
    assert [sum(isinstance(part, Media) for part in document.parts) for document in documents[:2]] == [1, 2]
    assert documents[2].messages[0].content[0] == Media("video", str(tmp_path.resolve() / "walk.mp4"))


def test_the_exam_runs(tmp_path):
    asking = next(block for block in blocks("python") if "grade" in block)
    (tmp_path / "ask.py").write_text(asking)
    done = subprocess.run([sys.executable, "ask.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    share, chance = (float(word) for word in (done.stdout.split()[0], done.stdout.split()[-1]))
    assert share == pytest.approx(13 / 200) and chance < 0.25
