"""Qwen3 with experts on meshes: losses over three steps, the balance loss of all layers among them, and every gradient of the first are those of one process.

All of it is the trainer's own path in float32 over gloo. What is balanced is a micro-batch on all ranks, so that a mesh is held against one process with the same rows in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _meshes import Meshes, check_gradients
from parallel_recipes import write_documents

TOLERANCE = 1e-5
THREE_ROWS = ("train.global_batch=3",)
PIPELINE = ("engine=pipeline", "train.micro_batch=2")
# What one process does: recipe and overrides.
WHOLE: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen": ("qwen", ()),
    "qwen, four micro-batches": ("qwen", ("train.micro_batch=2",)),
    "qwen, padding": ("qwen_padded", (*THREE_ROWS, "train.micro_batch=3")),
}
# Processes, what it must equal, and overrides.
MESHES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "tp2": (2, "qwen", ("mesh.tp=2",)),
    "cp2": (2, "qwen", ("mesh.cp=2",)),
    "ep2": (2, "qwen", ("mesh.ep=2", "train.micro_batch=4")),
    "dp2, recomputed": (2, "qwen", ("mesh.dp_shard=2", "train.micro_batch=4", "recompute.mode=blocks")),
    "pp2": (2, "qwen, four micro-batches", ("mesh.pp=2", *PIPELINE)),
    "tp2 pp2": (4, "qwen, four micro-batches", ("mesh.tp=2", "mesh.pp=2", *PIPELINE, "engine.schedule=zb_h1")),
    "cp2 dp2 ep4": (4, "qwen", ("mesh.cp=2", "mesh.dp_shard=2", "mesh.ep=4", "train.micro_batch=4")),
    "tp2 dp2, a rank with a row less": (4, "qwen, padding", ("mesh.tp=2", "mesh.dp_shard=2", "train.micro_batch=2", *THREE_ROWS)),
    "dp4, a rank with nothing but padding": (4, "qwen, padding", ("mesh.dp_shard=4", "train.micro_batch=1", *THREE_ROWS)),
}

# All meshes run at the first test's beginning.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Of one process, and of the meshes."""
    folder: Path = tmp_path_factory.mktemp("meshes")
    write_documents(folder)
    jobs = [
        {"name": name, "ranks": 1, "recipe": recipe, "overrides": list(overrides), "keep": name}
        for name, (recipe, overrides) in WHOLE.items()
    ]
    with Meshes(folder, 4) as meshes:
        found = meshes.run(jobs)
        jobs = [
            {"name": name, "ranks": ranks, "recipe": WHOLE[whole][0], "overrides": list(overrides), "compare": whole}
            for name, (ranks, whole, overrides) in MESHES.items()
        ]
        yield found | meshes.run(jobs)


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_equals_one_process(name: str, answers: dict[str, Any]) -> None:
    expected, found = answers[MESHES[name][1]], answers[name]
    assert "error" not in expected, expected["error"]
    assert "error" not in found, found["error"]
    assert len(expected["steps"]) == 3
    for step, numbers in expected["steps"].items():
        for what, value in numbers.items():
            assert found["steps"][step][what] == pytest.approx(value, rel=TOLERANCE), f"{what} of step {step}"
    assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=TOLERANCE)
    check_gradients(found["by_rank"], TOLERANCE)


def test_what_is_compared_matters(answers: dict[str, Any]) -> None:
    """One process learns, has a balance loss, and its value depends on which rows are balanced together."""
    steps = list(answers["qwen"]["steps"].values())
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"] and steps[0]["gradient_norm"] > 1.0
    one, other = (answers[name]["steps"]["1"]["moe.joint_loss"] for name in ("qwen", "qwen, four micro-batches"))
    assert one > 0.05 * 2 * 0.9 and one != pytest.approx(other, rel=1e-4)
