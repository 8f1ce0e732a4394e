"""The losses `policy` (with experts replayed and importance weights of whole sequences) and `dpo` on meshes: losses, sums and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _meshes import Meshes
from parallel_recipes import write_documents, write_preferences

TOLERANCE = 2e-5
POLICY = [
    "loss=policy", "loss.chunk=50", "loss.algorithm=grpo", "loss.algorithm.kl_coefficient=0.1", "loss.algorithm.kl_estimator=k2", "loss.algorithm.importance_outside=mask",
    "loss.algorithm.importance_level=sequence_mean", "loss.algorithm.importance_floor=1.2", "loss.algorithm.entropy_coefficient=0.05", "evaluation.every=0", "train.steps=3",
]  # fmt: skip
MESHES = {
    "dp2": (2, "deepseek", ["train.micro_batch=1"]),
    "tp2-recompute": (2, "deepseek", ["mesh.tp=2", "train.micro_batch=4", "recompute.mode=blocks"]),
    "cp2": (2, "deepseek", ["mesh.cp=2", "train.micro_batch=4"]),
    "ep2": (2, "deepseek", ["mesh.ep=2"]),
    "pp2": (2, "deepseek", ["mesh.pp=2", "engine=pipeline", "engine.schedule=1f1b"]),
    "tp2-cp2": (4, "deepseek", ["mesh.tp=2", "mesh.cp=2", "train.micro_batch=8"]),
    "llama-tp2": (2, "llama_tied", ["mesh.tp=2"]),
}

PAIRS = {
    "dpo-dp2": (2, []),
    "dpo-tp2": (2, ["mesh.tp=2"]),
    "dpo-cp2": (2, ["mesh.cp=2"]),
    "dpo-pp2": (2, ["mesh.pp=2", "engine=pipeline", "engine.schedule=1f1b"]),
}


def job(name: str, ranks: int, recipe: str, overrides: list[str], **more: Any) -> dict[str, Any]:
    routes = 3 if recipe == "deepseek" else 0
    return {
        "name": name,
        "ranks": ranks,
        "recipe": recipe,
        "routes": routes,
        "call": "_rl_policy:run_policy",
        "overrides": POLICY + overrides,
        **more,
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("policy")
    write_documents(folder)
    with Meshes(folder, 4) as meshes:
        one = meshes.run([job(recipe, 1, recipe, [], keep=recipe) for recipe in ("deepseek", "llama_tied")])
        yield one | meshes.run([job(name, ranks, recipe, more, compare=recipe) for name, (ranks, recipe, more) in MESHES.items()])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_equals_one_process(name: str, answers: dict[str, Any]) -> None:
    expected, found = answers[MESHES[name][1]], answers[name]
    assert "error" not in expected, expected["error"]
    assert "error" not in found, found["error"]
    assert len(expected["steps"]) == 3
    for step, numbers in expected["steps"].items():
        assert (
            {"kl", "entropy", "importance_share", "clip_share", "reference_kl", "ratio_mean"} <= set(numbers) == set(found["steps"][step])
        )
        for what, value in numbers.items():
            assert found["steps"][step][what] == pytest.approx(value, rel=TOLERANCE, abs=1e-7), f"{what} of step {step}"
    for rank, each in enumerate(found["by_rank"]):
        assert all(error < TOLERANCE for _, error in each["worst"]), (rank, each["worst"])


@pytest.fixture(scope="module")
def of_pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("pairs")
    write_preferences(folder)

    def run(name: str, ranks: int, more: list[str], **keys: Any) -> dict[str, Any]:
        return {"name": name, "ranks": ranks, "recipe": "preferences", "overrides": more, **keys}

    kept = ["checkpoint.every=100", "evaluation.every=0"]
    with Meshes(folder, 2) as meshes:
        one = meshes.run([run("one", 1, [], keep="one")])
        made = meshes.run([run(name, ranks, more, compare="one") for name, (ranks, more) in PAIRS.items()])
        cut = meshes.run([run("cut", 2, kept, stop_at=2)])
        yield one | made | cut | meshes.run([run("resumed", 1, [*kept, "mesh.dp_shard=1"], run="cut", resume=True)])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_on_a_mesh_equal_one_process(name: str, of_pairs: dict[str, Any]) -> None:
    expected, found = of_pairs["one"], of_pairs[name]
    assert "error" not in expected, expected["error"]
    assert "error" not in found, found["error"]
    assert expected["steps"]["1"]["margin"] == 0.0
    for step, numbers in expected["steps"].items():
        assert set(numbers) == set(found["steps"][step])
        for what, value in numbers.items():
            assert found["steps"][step][what] == pytest.approx(value, rel=TOLERANCE, abs=2e-6), f"{what} of step {step}"
    assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=TOLERANCE)
    for rank, each in enumerate(found["by_rank"]):
        assert all(error < TOLERANCE for _, error in each["worst"]), (rank, each["worst"])


def test_pairs_resume_on_another_number_of_processes(of_pairs: dict[str, Any]) -> None:
    """The reference goes along: the initial weights are gone."""
    expected, found = of_pairs["one"], of_pairs["resumed"]
    assert "error" not in found, found["error"]
    assert list(found["steps"]) == ["1", "2", "3", "4", "5"]
    for step, numbers in expected["steps"].items():
        assert found["steps"][step] == pytest.approx(numbers, rel=TOLERANCE, abs=2e-6)


def test_what_is_compared_matters(answers: dict[str, Any]) -> None:
    """One process itself leaves out some sequences, and is bounded somewhere."""
    first = answers["deepseek"]["steps"]["1"]
    assert 0.05 < first["importance_share"] < 0.95 and first["clip_share"] > 0.01 and first["reference_kl"] > 0.1
