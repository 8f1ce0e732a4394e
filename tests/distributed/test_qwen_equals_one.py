"""Qwen3-VL and Qwen3.5, dense and with experts, on meshes: losses over three steps and every gradient of the first are those of one process, with packed questions on images, and ranks without any.

All of it is the trainer's own path in float32 over gloo. What is balanced over experts is a micro-batch on all ranks, so that a mesh is held against one process with the same rows in each.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chz
import pytest
from _meshes import Meshes, check_gradients
from parallel_recipes import FOLDER, write_documents

TOLERANCE = 1e-5
RECIPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
FOUR = ("train.micro_batch=2",)
PIPELINE = ("engine=pipeline", *FOUR)
SHARED = ("parallel=declared", "parallel.vision=shared")
BALANCED = ("parallel=declared", "parallel.vision=balanced")
BALANCED_PIPELINE = "pp2 dp2, images balanced"
Mesh = tuple[int, bool, tuple[str, ...]]

# Processes, whether one process has four micro-batches, and overrides.
AXES: dict[str, Mesh] = {
    "tp2": (2, False, ("mesh.tp=2",)),
    "tp2, images shared": (2, False, ("mesh.tp=2", *SHARED)),
    "cp2": (2, False, ("mesh.cp=2",)),
    "cp2, images shared": (2, False, ("mesh.cp=2", *SHARED)),
    "pp2": (2, True, ("mesh.pp=2", *PIPELINE)),
    "dp2, recomputed": (2, False, ("mesh.dp_shard=2", "train.micro_batch=4", "recompute.mode=blocks")),
}
EXPERTS: dict[str, Mesh] = {
    "ep2": (2, False, ("mesh.ep=2", "train.micro_batch=4")),
    "cp2 dp2 ep4": (4, False, ("mesh.cp=2", "mesh.dp_shard=2", "mesh.ep=4", "train.micro_batch=4")),
    # In place of four micro-batches: a rank has consecutive rows of a step, so that of several micro-batches none is on all ranks what it is in one process.
    BALANCED_PIPELINE: (
        4,
        False,
        ("mesh.pp=2", "mesh.dp_shard=2", "engine=pipeline", "engine.few_micro_batches=true", "train.micro_batch=4", *BALANCED),
    ),
}
COMBINED: dict[str, Mesh] = {
    "tp2 pp2": (4, True, ("mesh.tp=2", "mesh.pp=2", *PIPELINE, "engine.schedule=zb_h1", *SHARED)),
    BALANCED_PIPELINE: (4, True, ("mesh.pp=2", "mesh.dp_shard=2", "engine=pipeline", "train.micro_batch=1", *BALANCED)),
    "dp2, images balanced": (2, False, ("mesh.dp_shard=2", "train.micro_batch=4", "recompute.mode=blocks", *BALANCED)),
    "tp2 cp2 dp2": (8, False, ("mesh.tp=2", "mesh.cp=2", "mesh.dp_shard=2", "train.micro_batch=4")),
    "pp2 cp2 tp2": (8, True, ("mesh.pp=2", "mesh.cp=2", "mesh.tp=2", *PIPELINE)),
}
HYBRID: dict[str, Mesh] = {"cp4": (4, False, ("mesh.cp=4",)), "cp4 tp2": (8, False, ("mesh.cp=4", "mesh.tp=2", *SHARED))}
# What the normal session runs: every axis once, DeepStack in a pipeline.
SHORT = {
    ("qwen3_5_moe", "tp2"),
    ("qwen3_5", "cp4"),
    ("qwen3_5_moe", "ep2"),
    ("qwen3_5", "pp2"),
    ("qwen3_vl_moe", "cp2, images shared"),
    ("qwen3_vl", "pp2"),
    ("qwen3_vl", "dp2, recomputed"),
}


def meshes_of(recipe: str) -> dict[str, Mesh]:
    """Those of a model."""
    return {**AXES, **COMBINED, **(EXPERTS if recipe.endswith("moe") else {}), **(HYBRID if recipe.startswith("qwen3_5") else {})}


CASES = [(recipe, mesh) for recipe in RECIPES for mesh in meshes_of(recipe)]


class Answers:
    """Runs that are made when they are first asked for, on processes that stay."""

    def __init__(self, folder: Path, meshes: Meshes) -> None:
        self._folder, self._meshes = folder, meshes
        self._found: dict[str, dict[str, Any]] = {}

    def whole(self, recipe: str, four: bool) -> dict[str, Any]:
        """One process's."""
        name = f"{recipe}{', four micro-batches' if four else ''}"
        return self._get({"name": name, "ranks": 1, "recipe": recipe, "overrides": list(FOUR if four else ()), "keep": name})

    def mesh(self, recipe: str, mesh: str) -> dict[str, Any]:
        """A mesh's."""
        ranks, four, overrides = meshes_of(recipe)[mesh]
        whole = self.whole(recipe, four)
        assert "error" not in whole, whole["error"]
        compare = f"{recipe}{', four micro-batches' if four else ''}"
        return self._get(
            {
                "name": f"{recipe} {mesh}".replace(",", ""),
                "ranks": ranks,
                "recipe": recipe,
                "overrides": list(overrides),
                "compare": compare,
            }
        )

    def _get(self, job: dict[str, Any]) -> dict[str, Any]:
        if job["name"] not in self._found:
            self._found |= self._meshes.run([job])
        return self._found[job["name"]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """See `Answers`."""
    folder: Path = tmp_path_factory.mktemp("meshes")
    write_documents(folder)
    with Meshes(folder) as meshes:
        yield Answers(folder, meshes)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "recipe,mesh", [pytest.param(*case, marks=() if case in SHORT else pytest.mark.slow, id=" ".join(case)) for case in CASES]
)
def test_a_mesh_equals_one_process(recipe: str, mesh: str, answers: Answers) -> None:
    expected, found = answers.whole(recipe, meshes_of(recipe)[mesh][1]), answers.mesh(recipe, mesh)
    assert "error" not in found, found["error"]
    assert len(expected["steps"]) == 3
    for step, numbers in expected["steps"].items():
        assert set(found["steps"][step]) == set(numbers)
        for what, value in numbers.items():
            assert found["steps"][step][what] == pytest.approx(value, rel=TOLERANCE), f"{what} of step {step}"
    assert found["evaluation"] == pytest.approx(expected["evaluation"], rel=TOLERANCE)
    check_gradients(found["by_rank"], TOLERANCE)


def test_what_is_compared_matters(answers: Answers) -> None:
    """One process itself learns, and has every loss that a mesh could get wrong."""
    steps = list(answers.whole("qwen3_5_moe", False)["steps"].values())
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert {"ahead_1", "moe.joint_loss"} <= set(steps[0])


def rows_of_micro_batches(folder: Path, ranks: int, micro_batch: int) -> list[set[int]]:
    """For each micro-batch of two steps its rows on all ranks."""
    import parallel_recipes
    from intarsia.plugins import current

    recipe = importlib.reload(parallel_recipes).qwen3_vl_moe()
    recipe = chz.replace(recipe, train=chz.replace(recipe.train, micro_batch=micro_batch))
    loaders = [current().build(recipe.data.loader, recipe, current(), rank, ranks, folder, "train") for rank in range(ranks)]
    steps = [[loader.next_step() for loader in loaders] for _ in range(2)]
    for loader in loaders:
        loader.close()
    return [set().union(*(batch.samples for batch in batches)) for step in steps for batches in zip(*step, strict=True)]


def test_experts_are_balanced_over_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every mesh of a mixture and the process that it is held against, slow ones too."""
    monkeypatch.setitem(os.environ, FOLDER, str(tmp_path))
    write_documents(tmp_path)
    rows: dict[tuple[int, int], list[set[int]]] = {}
    for recipe, mesh in CASES:
        if recipe.endswith("moe"):
            ranks, four, overrides = meshes_of(recipe)[mesh]
            settings = dict(each.split("=", 1) for each in overrides)
            # What is not cut in another way is data-parallel.
            ranks //= math.prod(int(settings.get(f"mesh.{axis}", 1)) for axis in ("pp", "cp", "tp"))
            keys = [(1, 2 if four else 8), (ranks, int(settings.get("train.micro_batch", 8)))]
            for key in set(keys) - set(rows):
                rows[key] = rows_of_micro_batches(tmp_path, *key)
            assert rows[keys[0]] == rows[keys[1]], (recipe, mesh)


def test_a_rank_has_no_images_where_the_other_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In some step of `dp2`, and of a pipeline's micro-batches."""
    import parallel_recipes
    from intarsia.plugins import current

    monkeypatch.setitem(os.environ, FOLDER, str(tmp_path))
    write_documents(tmp_path)
    recipe = importlib.reload(parallel_recipes).qwen3_5()
    recipe = chz.replace(recipe, train=chz.replace(recipe.train, micro_batch=1))
    ranks = [current().build(recipe.data.loader, recipe, current(), rank, 2, tmp_path, "train") for rank in range(2)]
    seen = [[[batch.extra["patches_NC"]().shape[0] for batch in loader.next_step()] for loader in ranks] for _ in range(3)]
    for loader in ranks:
        loader.close()
    assert any(bool(one) != bool(other) for step in seen for one, other in zip(*step, strict=True)), seen
    assert all(any(any(rank) for rank in step) for step in seen)
