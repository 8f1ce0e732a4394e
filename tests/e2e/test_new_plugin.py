"""`intarsia new-plugin`: every kind's scaffold installs, is red only where something is left to write, and green once it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from intarsia.cli import main
from intarsia_testing.cli_new_plugin import KINDS

from tests.support.pip_site import install

WRITTEN = {
    'raise NotImplementedError("write `Zig.cut`: for each rank a tuple of Box, disjoint and covering `member.shape`.")': """\
whole = tuple(Box.whole(member.shape) for _ in range(1 if member.numel or not member.shape else 0))
        return tuple(whole if rank == ranks - 1 else () for rank in range(ranks))"""
}


def conformance(site: Path, *folders: Path) -> tuple[list[str], str]:
    """Names of failed tests, and the conformance report, of the tests of these distributions."""
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--tb=no", "-c", "/dev/null", "--rootdir", str(site)]
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *(str(folder / "tests") for folder in folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    # The summary is left out: its lines are cut to the terminal's width, but whole where CI is set.
    report = done.stdout.partition("intarsia conformance")[2].partition("short test summary info")[0]
    return re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE), report


def test_every_scaffold_is_red_only_where_something_is_left_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in KINDS:
        assert main(["new-plugin", kind, f"acme-{kind}", "--dir", str(tmp_path), "--entry", "mine"]) == 0
        assert "conformance report says what is left to write" in capsys.readouterr().out
    folders = [tmp_path / f"acme-{kind}" for kind in KINDS]
    site = tmp_path / "site"
    install(site, *folders)
    failed, report = conformance(site, *folders)
    assert "broken" not in report, report
    assert not {"test_entry_modules_import_no_torch", "test_entry_names_what_exists"} & set(failed)
    sections = dict(re.findall(r"^[a-z -]+ acme-([a-z-]+):mine \(\w+\) keeps \d+ of \d+ promises(.*(?:\n  .*)*)", report, re.MULTILINE))
    assert sections.keys() == KINDS.keys(), report
    for kind, section in sections.items():
        places = re.findall(r"^  to write (.+) \(\d+ promises?\)$", section, re.MULTILINE)
        sources = "".join(path.read_text() for path in (tmp_path / f"acme-{kind}").rglob("*.py"))
        assert places, kind
        for place in places:
            assert f"write {place}" in sources


def test_what_is_written_turns_green(tmp_path: Path) -> None:
    main(["new-plugin", "placement", "acme-zig", "--dir", str(tmp_path)])
    folder, site = tmp_path / "acme-zig", tmp_path / "site"
    path = folder / "acme_zig" / "placement.py"
    text = path.read_text().replace("import Member, Partition, Region", "import Box, Member, Partition, Region")
    for stub, code in WRITTEN.items():
        assert stub in text
        text = text.replace(stub, code)
    path.write_text(text)
    install(site, folder)
    failed, report = conformance(site, folder)
    assert not failed, report
    assert "placement acme-zig:zig (TestZig) keeps 15 of 15 promises." in report


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("stroage", "acme-x"), "Did you mean 'storage'?"),
        (("storage", "Acme_X"), "Take 'acme-x'"),
        (("storage", "json"), "acme-json"),
        (("storage", "intarsia-x"), "acme-x"),
        (("storage", "taken"), "exists already"),
        (("kernel", "acme-x", "--op", "swigluu"), "'swiglu'"),
        (("storage", "acme-x", "--entry", "A B"), "no name for an entry"),
    ],
)
def test_refusals_say_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "taken").mkdir()
    assert main(["new-plugin", *arguments, "--dir", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
