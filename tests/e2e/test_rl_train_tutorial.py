"""docs/tutorial/own-environment.md: its files are an environment that passes the kit, and its commands run as they stand there (with fewer steps)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial" / "own-environment.md").read_text("utf-8")
SMALLER = {"train.steps": "2"}
MORE = ("data.loader.groups=2", "data.loader.group=2", "data.loader.held_out.tasks=2")


def write_files(folder: Path) -> None:
    """The files of the page, and what installing them leaves."""
    files = re.findall(r"^```\w+ title=\"([^\"]+)\"\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(files) == 6
    for name, text in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    about = folder / "acme-last" / "acme_last-0.1.0.dist-info"
    about.mkdir()
    entry = re.search(r"entry-points.intarsia\]\n(.*)\n", PAGE)
    assert entry is not None
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-last\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text(f"[intarsia]\n{entry[1].replace(chr(34), '')}\n")


def commands() -> list[list[str]]:
    """The indented commands, in order; a trained run is made small."""
    found = []
    for line in re.findall(r"^    (intarsia .*|pytest .*)$", PAGE, re.MULTILINE):
        words = [re.sub(r"^([\w.]+)=(.*)$", lambda m: f"{m[1]}={SMALLER.get(m[1], m[2])}", word) for word in shlex.split(line)]
        if words[:3] == ["intarsia", "train", "arithmetic/debug"]:
            words += MORE
        found.append([word.replace("150", "2") if word == "150" else word for word in words])
    return found


@pytest.mark.timeout(1800)
def test_the_tutorial(tmp_path: Path) -> None:
    write_files(tmp_path)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "acme-last"), os.environ.get("PYTHONPATH", "")]),
    }
    ran = []
    for words in commands():
        program = (
            ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if words[0] == "pytest" else ["-c", "from intarsia.cli import run; run()"]
        )
        done = subprocess.run(
            [sys.executable, *program, *words[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, (words, done.stdout[-3000:], done.stderr[-3000:])
        ran.append((words[1], done.stdout))
    assert [name for name, _ in ran] == ["plugins", "acme-last/tests", "train", "train", "show", "rl", "rl", "rl"]
    assert "acme-last" in ran[0][1] and "passed" in ran[1][1] and "held out after step 2" in ran[2][1] and "held_out.reward" in ran[4][1]
    assert ran[7][1].splitlines()[-1] == "1 of 1 samples"
