"""`rollouts/` and `intarsia rl show`: what is written, what a torn file gives, filters, gaps, JSON, and that no torch is imported."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from intarsia.cli import main
from intarsia.contracts import Turn
from intarsia.train.events import append_event
from intarsia_rl.contracts import Failure, Routes, Sample, Segment
from intarsia_rl.controller.writer import RolloutWriter, files, read


def sample(number: int, member: int, reward: float, length: int = 3, failure: Failure | None = None) -> Sample:
    tokens = (7, *range(length))
    segment = Segment(
        tokens, (False, *[True] * length), (0.0, *[-1.0] * length), (-1, *[number] * length), Routes(b"\0\0" * length, (length, 1, 1))
    )
    turns = (Turn("user", "q"), Turn("assistant", f"answer {number}", tokens[1:]))
    segments = () if failure else (segment,)
    return Sample(
        f"{number}/{member}",
        number,
        member,
        f"task-{number}",
        segments,
        turns,
        reward,
        {"exact": reward},
        truncated=member == 1,
        failure=failure,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps, of which the second has a failure and a filtered group; an evaluation; what the trainer says of the first."""
    writer = RolloutWriter(tmp_path, lambda ids: " ".join(map(str, ids)))
    for step in range(3):
        made = [sample(step, 0, 0.5 * step), sample(step, 1, 0.25, length=step + 2)]
        lines = [writer.line(each, step=step + 1, status="kept", advantage=1.0, lag=0) for each in made]
        if step == 1:
            lines.append(
                writer.line(sample(9, 0, 0.0, failure=Failure("tool", "it broke", 3)), step=2, status="failed", advantage=0.0, lag=0)
            )
            lines.append(writer.line(sample(8, 0, 1.0), step=2, status="filtered", advantage=0.0, lag=0))
        writer.write("step", step + 1, lines)
    writer.write("held_out", 0, [writer.line(sample(5, 0, 1.0), step=0, status="held_out")])
    writer.write("trained", 1, [{"id": "0/0", "segment": 0, "log_probs": [-1.0, -1.25, -1.0]}])
    append_event(tmp_path, "rollouts", step=1, gap=0.0, idle={"trainer": 0.5, "generators": 0.25}, kills={"generators": 1, "workers": 0})
    append_event(tmp_path, "rollouts", step=2, gap=1e-6)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["rl", "show", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_table_of_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, str(run))
    assert len(lines) == 4 and lines[1].split()[:2] == ["1", "0.1250"] and lines[1].endswith("0.0    50%/25%") and "1.0e-06" in lines[2]
    table = json.loads("\n".join(shown(capsys, str(run), "--json")))
    assert table[1]["failures"] == {"tool": 1} and table[1]["filtered"] == 1 and table[0]["kills"] == {"generators": 1, "workers": 0}
    assert [row["longest"] for row in table] == [3, 3, 4]
    assert len(shown(capsys, str(run), "--held-out")) == 2
    assert len(shown(capsys, str(run), "--step", "2:")) == 3 and len(shown(capsys, str(run), "--step", "3")) == 2


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (["--min-reward", "0.5"], ["1/0", "8/0", "2/0"]),
        (["--max-reward", "0.0"], ["0/0"]),
        (["--failure", "any"], ["9/0"]),
        (["--failure", "sandbox"], []),
        (["--min-length", "4"], ["2/1"]),
        (["--max-length", "2"], ["0/1"]),
        (["--truncated", "--step", "2:3"], ["1/1", "2/1"]),
        (["--task", "task-2"], ["2/0", "2/1"]),
        (["--status", "filtered"], ["8/0"]),
        (["--sample", "1/1"], ["1/1"]),
    ],
)
def test_filters(run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], ids: list[str]) -> None:
    assert [json.loads(line)["id"] for line in shown(capsys, str(run), "--json", *arguments)] == ids
    lines = shown(capsys, str(run), *arguments)
    assert lines[-1] == f"{len(ids)} of {len(ids)} samples" and len(lines) == len(ids) + 1


def test_an_unknown_sample_is_said_with_the_nearest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--sample", "1/11"], ("No sample of steps 1 to 3 has the id '1/11'", "Did you mean", "1/1")),
        (["--sample", "held_out/0/9", "--held-out"], ("No sample of step 0 has the id",)),
    ):
        assert main(["rl", "show", str(run), *arguments]) == 2
        told = capsys.readouterr().err
        assert all(each in told for each in words), told
    # One that is there, and that other filters leave out, is no mistake.
    assert shown(capsys, str(run), "--sample", "0/0", "--min-length", "99")[-1] == "0 of 0 samples"


def test_one_sample_token_by_token(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, str(run), "--sample", "0/0", "--tokens")
    assert "gap 2.5e-01" in lines[0] and "    assistant: answer 0" in lines
    rows = [line.split() for line in lines if line.strip()[:1].isdigit() and len(line.split()) in (2, 5)]
    assert rows == [
        ["0", "7"],
        ["1", "0", "-1.000000", "0", "0.0"],
        ["2", "1", "-1.000000", "0", "-2.5e-01"],
        ["3", "2", "-1.000000", "0", "0.0"],
    ]
    assert "FAILED at tool after 3 attempts: it broke" in shown(capsys, str(run), "--failure", "tool")[0]
    assert shown(capsys, str(run), "--min-reward", "0", "--limit", "2")[-1] == "2 of 7 samples (--limit 0 shows all)"
    assert shown(capsys, str(run), "--step", "1", "--limit", "1")[-1] == "1 of 2 samples (--limit 0 shows all)"
    [record] = [json.loads(line) for line in shown(capsys, str(run), "--json", "--sample", "0/0")]
    assert record["gap"] == 0.25 and record["segments"][0]["text"] == "7 0 1 2" and record["segments"][0]["routes"] == {"shape": [3, 1, 1]}


def test_what_weights_moved_is_not_called_a_gap(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "rollouts" / "step-000001.jsonl"
    path.write_text(path.read_text().replace('"lag": 0', '"lag": 1').replace('"lag":0', '"lag":1'))
    line, *rest = shown(capsys, str(run), "--sample", "0/0", "--tokens")
    assert "lag 1 moved 2.5e-01" in line and any(row.split()[-1:] == ["moved"] for row in rest)


def test_torn_lines_are_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "rollouts" / "step-000003.jsonl"
    text = path.read_text()
    path.write_text(text[: len(text) - 40] + "\n[1]\nnull")
    assert [record["id"] for record in read(path)] == ["2/0"]
    assert [row["samples"] for row in json.loads("\n".join(shown(capsys, str(run), "--json")))] == [2, 4, 1]


def test_a_run_that_goes_on_drops_what_it_will_do_again(run: Path) -> None:
    RolloutWriter(run, str).resume(1)
    assert [(kind, number) for kind, number, _ in files(run / "rollouts")] == [("held_out", 0), ("step", 1), ("trained", 1)]
    RolloutWriter(run, str).resume(0)
    assert [path.name for _, _, path in files(run / "rollouts")] == ["held_out-000000.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "There is no directory nowhere"),
        (["{run}/rollouts"], "has no folder rollouts"),
        (["{run}", "--step", "7"], "there are 1 to 3"),
        (["{run}", "--step", "x"], "is no step N and no range"),
        (["{run}", "--lenght", "7"], "unrecognized arguments"),
        (["{run}", "--failure", "sandbx"], "Did you mean 'sandbox'"),
        (["{run}", "--held-out", "--status", "kept"], "evaluations (--held-out) have none"),
        (["{run}", "--limit", "-1"], "--limit is -1; it must be at least 1, or 0 for all"),
    ],
)
def test_what_cannot_be_shown(run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert main(["rl", "show", *(argument.format(run=run) for argument in arguments)]) == 2
    assert text in capsys.readouterr().err


def test_the_command_imports_no_torch(run: Path) -> None:
    code = "import sys; from intarsia.cli import main; main(['rl', 'show', sys.argv[1]]); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(run)], stdout=subprocess.DEVNULL, timeout=600).returncode == 0


def test_the_trainers_numbers_are_put_to_their_segments() -> None:
    import torch
    from intarsia_rl.hooks import trained_lines
    from intarsia_rl.packing import Packing, Weighed, micro_batches

    made: list[Any] = [dataclasses.replace(sample(number, 0, 1.0, length=4 + number), segments=sample(number, 0, 1.0, length=4 + number).segments * 2) for number in range(3)]  # fmt: skip
    [batch] = micro_batches([Weighed(each, 1.0, 1.0, 1) for each in made], Packing(16, 8, 0), 0, 1, 0)
    where = (batch.labels_BS != -100).flatten().nonzero().squeeze(1)
    values = batch.labels_BS.flatten()[where].float() + 100 * batch.documents_BS.flatten()[where]
    lines = trained_lines(batch, where, values)
    assert sorted((line["id"], line["segment"]) for line in lines) == [(f"{number}/0", place) for number in range(3) for place in range(2)]
    for line in lines:
        expected = list(range(4 + int(line["id"][0])))
        assert [value % 100 for value in line["log_probs"]] == expected and len({value // 100 for value in line["log_probs"]}) == 1
    assert isinstance(where, torch.Tensor)


def test_text_that_is_no_unicode_is_written_and_comes_back(tmp_path: Path) -> None:
    """Broken output of tools has halves of surrogate pairs: they neither end the run nor are lost."""
    writer = RolloutWriter(tmp_path, str)
    writer.write("step", 1, [{"id": "a", "text": "é \ud800 \U0001f600"}])
    [(_, _, path)] = files(tmp_path / "rollouts")
    assert [line["text"] for line in read(path)] == ["é \ud800 \U0001f600"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_is_shown_what_it_would_obey_or_cannot_show_as_escapes(tmp_path: Path, encoding: str) -> None:
    writer = RolloutWriter(tmp_path, lambda ids: "")
    odd = "one\ntwo\x1b[2J\x9b\udc80\u00e9"
    said = dataclasses.replace(sample(0, 0, 1.0), turns=(Turn("user", odd), Turn("assistant", odd)))
    failed = sample(0, 1, 0.0, failure=Failure("tool", odd, 3))
    writer.write("step", 1, [writer.line(each, step=1, status="kept", advantage=0.0, lag=0) for each in (said, failed)])

    def shown_there(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "intarsia", "rl", "show", str(tmp_path), *arguments]
        done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode(encoding).split("\n")

    lines = shown_there("--limit", "0")
    assert len(lines) == 4 and all(line.isprintable() for line in lines)
    letter = "\u00e9" if encoding == "utf-8" else "\\xe9"
    assert all("\\u001b[2J\\x9b\\udc80" + letter in line.replace("\\x1b", "\\u001b") for line in lines[:2])
    assert all(line.isprintable() for line in shown_there("--tokens"))
    assert json.loads(shown_there("--json", "--failure", "tool")[0])["failure"]["message"] == odd
