"""`intarsia pipeline show`: the picture, the numbers, JSON, and what is told of wrong arguments. No torch."""

from __future__ import annotations

import json

import pytest
from intarsia.cli import main


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["pipeline", "show", *arguments]) == 0
    return capsys.readouterr().out


def test_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "1f1b", "--ranks", "2", "--micro-batches", "3", "--width", "100")
    lines = text.splitlines()
    assert lines[:3] == [
        "       0              5              10",
        "rank 0 |F0|F1······|B0   |F2|B1   ···|B2   ",
        "rank 1 ···|F0|B0   |F1|B1   |F2|B2   ······",
    ]
    assert "F forward; B backward; number: micro-batch; dots: idle" in lines
    assert "1f1b: 2 ranks, 2 stages, 3 micro-batches" in lines
    assert "makespan 12, of which ranks stand idle 3 (25.0% on average)" in lines
    assert "activations kept at most (each of one stage and micro-batch): 1 to 2" in lines


def test_a_wide_picture_goes_on_below(capsys: pytest.CaptureFixture[str]) -> None:
    lines = show(capsys, "zbv", "--ranks", "2", "--micro-batches", "8", "--width", "50").splitlines()
    rows = [line for line in lines if line.startswith("rank")]
    assert len(rows) > 2 and max(map(len, rows)) <= 50
    assert rows[0].startswith("rank 0 |F0|F1|F2|f0|i0|w0")
    assert "bubble within a rank's own first and last action: at most 0" in lines


def test_pairs_virtual_stages_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "dualpipev", "--ranks", "2", "--micro-batches", "6", "--times", "f=1,i=1,w=1,pair=2.5")
    assert "F3&b1" in text and "F5&b3: beside each other" in text
    text = show(capsys, "interleaved", "--virtual", "3", "--ranks", "2", "--micro-batches", "4")
    assert "|F2.3" in text and "6 stages, 3 on each rank" in text
    assert show(capsys, "interleaved", "virtual_stages=3", "--ranks", "2", "--micro-batches", "4") == text


def test_many_ranks_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("1f1b", "--ranks", "40", "--micro-batches", "40", "--width", "4000")
    assert "..." in show(capsys, *arguments).splitlines()
    assert "..." not in show(capsys, *arguments, "--all").splitlines()


def test_actions_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "zb_h1", "--ranks", "2", "--micro-batches", "2", "--actions")
    assert "rank 1: UNSHARD(1) RECEIVE_F(1:0) F(1:0) RECEIVE_F(1:1) I(1:0) SEND_B(1:0) F(1:1)" in text
    found = json.loads(show(capsys, "zb_h1", "--ranks", "4", "--micro-batches", "8", "--json"))
    assert found["bubble"] == 3 and found["peak_live"] == [4, 4, 4, 4] and found["placement"] == [0, 1, 2, 3]
    assert found["spans"][1][0] == ["F", 1, 0, 1.0, 2.0] and found["plan"][0][0] == ["UNSHARD", 0, -1]


def test_few_micro_batches_are_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs 7 micro-batches" in show(capsys, "zbv", "--micro-batches", "3")


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("1f1c",), "Did you mean '1f1b'"),
        (("1f1b", "--virtual", "2"), "'1f1b' has 1 stage on each rank, not 2"),
        (("1f1b", "virtual_stages=2"), "has no setting 'virtual_stages'"),
        (("interleaved", "virtual_stages"), "settings are NAME=VALUE"),
        (("interleaved", "virtual_stages=two"), "virtual_stages"),
        (("1f1b", "--times", "x=1"), "there is no time 'x'"),
        (("1f1b", "--times", "f=fast"), "f is 'fast', which is no number"),
        (("1f1b", "--times", "f=-1"), "times are 0 or more"),
        (("1f1b", "--times", "f=inf"), "times: f is inf; times are 0 or more, and at most 1e+15"),
        (("1f1b", "--times", "f=1e308"), "at most 1e+15"),
        (("1f1b", "--times", "f=1,f=2"), "--times names f twice"),
        (("interleaved", "virtual_stages=2", "virtual_stages=3"), "virtual_stages is given twice, as 2 and 3"),
        (("interleaved", "virtual_stages=2", "--virtual", "3"), "virtual_stages is given twice"),
        (("1f1b", "--ranks", "0"), "at least 1 rank"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str) -> None:
    assert main(["pipeline", "show", *arguments]) == 2
    assert told in capsys.readouterr().err
