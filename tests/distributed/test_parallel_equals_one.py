"""Llama 3 and DeepSeek-V3 (latent attention, experts, multi-token prediction) on meshes: losses over five steps and every gradient of the first are those of one process.

All of it is the trainer's own path in float32 over gloo: loader, paralleliser, sharder, engine, clipping, optimizer, evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _mesh_scenarios import SETS
from _meshes import Meshes, check_gradients
from parallel_recipes import write_documents

TOLERANCE = 1e-5
JOBS = {job["name"]: job for make in SETS.values() for job in make()}

# All meshes run at the first test's beginning.
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Of all runs: those of one process, by the names of their recipes, then the meshes'."""
    folder: Path = tmp_path_factory.mktemp("meshes")
    write_documents(folder)
    recipes = sorted({job["recipe"] for job in JOBS.values()})
    with Meshes(folder) as meshes:
        found = meshes.run([{"name": recipe, "ranks": 1, "recipe": recipe, "keep": recipe} for recipe in recipes])
        yield found | meshes.run(list(JOBS.values()))


@pytest.mark.parametrize("name", JOBS)
def test_a_mesh_equals_one_process(name: str, answers: dict[str, Any]) -> None:
    expected, found = answers[JOBS[name]["recipe"]], answers[name]
    assert "error" not in expected, expected["error"]
    assert "error" not in found, found["error"]
    assert len(expected["steps"]) == 5
    for step, numbers in expected["steps"].items():
        assert set(found["steps"][step]) == set(numbers)
        for what, value in numbers.items():
            assert found["steps"][step][what] == pytest.approx(value, rel=TOLERANCE), f"{what} of step {step}"
    assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=TOLERANCE)
    check_gradients(found["by_rank"], TOLERANCE)


@pytest.mark.parametrize("recipe", ["llama", "deepseek"])
def test_what_is_compared_matters(recipe: str, answers: dict[str, Any]) -> None:
    """One process itself learns, clips, and has every loss that a mesh could get wrong."""
    steps = list(answers[recipe]["steps"].values())
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert steps[0]["gradient_norm"] > 1.0
    further = {"ahead_1", "moe.1.sequence_loss", "moe.mtp.0.sequence_loss"} if recipe == "deepseek" else set()
    assert further <= set(steps[0])
