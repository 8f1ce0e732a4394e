"""`intarsia parallel check` between processes: Llama 3's debug size on tensor-parallel meshes equals one process, and what does not is told by name."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _meshes import Meshes
from _spawn import spawn

SMALL = ["--sequence", "13", "--rows", "2"]


def command(*words: str) -> tuple[int, str]:
    """The command's exit code and what it printed on this rank."""
    from intarsia.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(["parallel", "check", *words])
    return code, printed.getvalue()


def command_of_third_party(folder: str, *words: str) -> tuple[int, str]:
    """The same where the example of a third party's family is installed: its metadata in `folder`, its code where it stands."""
    sys.path[:0] = [folder, str(Path(__file__).parents[2] / "examples" / "model")]
    return command(*words)


def broken_command(*words: str) -> tuple[int, str]:
    """The same with a role that forgets to sum: every rank goes on with its own part of the partial products."""
    from intarsia_parallel.roles import row

    row.scatter_sum = lambda x, dim, counts, comm, what: x.split(counts, dim)[comm.rank]
    return command(*words)


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meshes]:
    """Processes for all tests whose commands leave a process as it was."""
    with Meshes(tmp_path_factory.mktemp("tensor"), 4) as made:
        yield made


def on_ranks(meshes: Meshes, ranks: int, *words: str) -> list[tuple[int, str]]:
    """The command's exit codes and what it printed, by rank."""
    answer = meshes.run([{"name": "command", "ranks": ranks, "call": "run_command", "words": words}])["command"]
    assert "error" not in answer, answer["error"]
    return [(code, text) for code, text in answer["by_rank"]]


@pytest.mark.parametrize(
    ("mesh", "ranks", "further"),
    [
        ("tp=2", 2, ["model.tied=true", "recompute.mode=blocks"]),
        ("tp=2", 2, ["compile.mode=local", "compile.backend=aot_eager", "recompute.mode=blocks", "recompute.every=2"]),
        ("tp=3", 3, ["model.vocab_size=322", "--rows", "1", "--sequence", "7"]),
        ("tp=4", 4, ["model...heads=8"]),
        ("tp=2,dp_shard=2", 4, ["sharder.placement=owned", "--micro-batches", "1"]),
        ("tp=2,cp=2", 4, []),
    ],
)
def test_llama3_equals_one_process(mesh, ranks, further, meshes):
    outcomes = on_ranks(meshes, ranks, "parallel", "check", "llama3", "--mesh", mesh, *SMALL, *further)
    assert [code for code, _ in outcomes] == [0] * ranks, outcomes[0][1]
    assert "Equal to one process within 1e-05: outputs, loss and 3" in outcomes[0][1]


@pytest.mark.parametrize(("subject", "mesh"), [("acme-parallel:parallel", "tp=2"), ("parallel", "cp=2")])
def test_a_third_partys_family_equals_one_process(subject, mesh, tmp_path):
    """By its short and its full name, without a line about it anywhere but in its own distribution."""
    metadata = tmp_path / "acme_parallel-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-parallel\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[intarsia]\nparallel = acme_parallel.plugin\n")
    outcomes = spawn(command_of_third_party, 2, str(tmp_path), subject, "--mesh", mesh, *SMALL, world=False)
    assert [code for code, _ in outcomes] == [0, 0], outcomes[0][1]
    assert "parallel-debug on" in outcomes[0][1] and "Equal to one process" in outcomes[0][1]


def test_what_differs_is_named_with_its_role():
    outcomes = spawn(broken_command, 2, "llama3", "--mesh", "tp=2", *SMALL, world=False)
    assert [code for code, _ in outcomes] == [1, 1]
    text = outcomes[0][1]
    assert "FAILED: " in text and "DIFFERS" in text
    assert "layers.0.attention.wq.weight" in text and "column" in text
    assert "to check the rest" not in text


FIXED = ("parallel=declared", "parallel.dispatcher=fixed_capacity", "parallel.dispatcher.factor=0.4")


def test_pairs_that_overflow_are_told_and_not_what_differs_for_it(meshes):
    outcomes = on_ranks(meshes, 2, "parallel", "check", "deepseek_v3", "--mesh", "dp_shard=2,ep=2", *SMALL, *FIXED)
    assert [code for code, _ in outcomes] == [2, 2], outcomes[0][1]
    assert "did not fit into what ranks send each other (factor 0.4" in outcomes[0][1] and "DIFFERS" not in outcomes[0][1]


def test_pairs_that_are_dropped_by_setting_explain_what_differs(meshes):
    drop = (*FIXED, "parallel.dispatcher.overflow=drop")
    outcomes = on_ranks(meshes, 2, "parallel", "check", "deepseek_v3", "--mesh", "dp_shard=2,ep=2", *SMALL, *drop)
    assert [code for code, _ in outcomes] == [1, 1], outcomes[0][1]
    assert "FAILED: " in outcomes[0][1] and "of 4 layers (layers.1.feed_forward.experts first) may leave pairs" in outcomes[0][1]


def test_a_loss_of_all_ranks_tokens_together_is_one_process_too(meshes):
    outcomes = on_ranks(meshes, 2, "parallel", "check", "qwen3/moe-debug", "--mesh", "dp_shard=2,ep=2", *SMALL)
    assert [code for code, _ in outcomes] == [0, 0], outcomes[0][1]
    assert "Equal to one process within 1e-05" in outcomes[0][1]


def test_noise_explains_what_differs(meshes):
    outcomes = on_ranks(meshes, 2, "parallel", "check", "deepseek_v3", "--mesh", "tp=2", *SMALL, "model...jitter=0.1")
    assert [code for code, _ in outcomes] == [1, 1], outcomes[0][1]
    assert "FAILED: " in outcomes[0][1] and outcomes[0][1].rstrip().endswith("switch that off to check the rest.")


def test_gradients_that_are_rounding_alone_are_not_compared(meshes):
    """Rows of three tokens leave a depth of prediction with tokens that see one key: queries have no gradient but what rounding leaves of sums that cancel."""
    outcomes = on_ranks(meshes, 2, "parallel", "check", "deepseek_v3", "--mesh", "cp=2", "--sequence", "3", "--all")
    assert [code for code, _ in outcomes] == [0, 0], outcomes[0][1]
    told = [line for line in outcomes[0][1].splitlines() if "rounding alone on both sides" in line]
    assert any("mtp.0.block.attention.wq_b.weight" in line for line in told) and len(told) == 3


def test_the_trainer_runs_a_tensor_parallel_mesh(meshes, tmp_path):
    """Two steps of training, as the command line does them."""
    recipe = ["llama3/debug", "mesh.tp=2", "train.steps=2", "train.global_batch=2", "train.micro_batch=1", "train.sequence_length=33"]
    outcomes = on_ranks(meshes, 2, "train", *recipe, "evaluation.every=0", "--dir", f"{tmp_path}/run", "--quiet")
    assert [code for code, _ in outcomes] == [0, 0], outcomes[0][1]
