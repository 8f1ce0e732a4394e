"""Checkpoints move between meshes: a run that stops, and is resumed on another mesh, again and again, goes on as the unbroken run of one process; Hugging Face folders
written of a mesh's run are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _meshes import Meshes
from parallel_recipes import write_documents

pytestmark = pytest.mark.timeout(2400)

TOLERANCE = 1e-5
PIPELINE = ("engine=pipeline",)
CHAINS: dict[str, tuple[str, list[tuple[str, int, tuple[str, ...]]]]] = {
    "meshes": (
        "deepseek",
        [
            ("tp2", 2, ("mesh.tp=2",)),
            ("pp2-tp2", 4, ("mesh.pp=2", "mesh.tp=2", *PIPELINE)),
            ("cp2-dp2", 4, ("mesh.cp=2", "mesh.dp_shard=2")),
            ("ep2-dp2", 4, ("mesh.ep=2", "mesh.dp_shard=4", "train.micro_batch=1")),
            ("one", 1, ()),
            ("pp2-zbv", 2, ("mesh.pp=2", *PIPELINE, "engine.schedule=zbv")),
            ("replicas", 4, ("mesh.ep=2", "mesh.dp_replicate=2")),
        ],
    ),
    "ties": (
        "deepseek_tied_muon",
        [
            ("pp2-zbv", 2, ("mesh.pp=2", *PIPELINE, "engine.schedule=zbv")),
            ("pp2-1f1b", 2, ("mesh.pp=2", *PIPELINE)),
            ("ep2-tp2", 2, ("mesh.ep=2", "mesh.tp=2")),
            ("pp2-tp2", 4, ("mesh.pp=2", "mesh.tp=2", *PIPELINE, "engine.schedule=gpipe")),
            ("one", 1, ()),
        ],
    ),
}
# Up to eight processes: the other meshes of `_mesh_scenarios`, one after the other.
WIDE: dict[str, tuple[str, list[tuple[str, int, tuple[str, ...]]]]] = {
    "wide": (
        "deepseek_deep",
        [
            ("tp4", 4, ("mesh.tp=4",)),
            ("pp4-interleaved", 4, ("mesh.pp=4", *PIPELINE, "engine.schedule=interleaved")),
            ("cp4-ring", 4, ("mesh.cp=4", "parallel=declared", "parallel.context=ring")),
            ("pp2-tp2-dp2", 8, ("mesh.pp=2", "mesh.tp=2", "mesh.dp_shard=2", *PIPELINE)),
            ("ep4", 4, ("mesh.ep=4", "train.micro_batch=1")),
            ("pp2-ep2-dp2", 4, ("mesh.pp=2", "mesh.ep=2", "mesh.dp_shard=2", *PIPELINE, "engine.schedule=zb_h1")),
            ("cp2-tp2-dp2", 8, ("mesh.cp=2", "mesh.tp=2", "mesh.dp_shard=2")),
            ("pp4-dualpipev", 4, ("mesh.pp=4", "train.micro_batch=1", *PIPELINE, "engine.schedule=dualpipev")),
            ("pp2-cp2-tp2", 8, ("mesh.pp=2", "mesh.cp=2", "mesh.tp=2", *PIPELINE, "engine.schedule=zbv")),
            ("one", 1, ()),
        ],
    ),
    "wide-heads": (
        "llama_muon",
        [
            ("tp4", 4, ("mesh.tp=4",)),
            ("pp2-cp2-tp2", 8, ("mesh.pp=2", "mesh.cp=2", "mesh.tp=2", *PIPELINE)),
            ("cp4-ulysses", 4, ("mesh.cp=4", "parallel=declared", "parallel.context=ulysses")),
            ("pp4-gpipe", 4, ("mesh.pp=4", *PIPELINE, "engine.schedule=gpipe")),
            ("pp2-tp2-dp2", 8, ("mesh.pp=2", "mesh.tp=2", "mesh.dp_shard=2", *PIPELINE)),
            ("one", 1, ()),
        ],
    ),
}
EACH = 2


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meshes]:
    """Processes for all tests."""
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    write_documents(folder)
    with Meshes(folder) as made:
        yield made


@pytest.mark.parametrize("name", [*CHAINS, *(pytest.param(name, marks=pytest.mark.slow) for name in WIDE)])
def test_a_run_moves_from_mesh_to_mesh(name: str, meshes: Meshes) -> None:
    recipe, links = (CHAINS | WIDE)[name]
    steps = f"train.steps={EACH * len(links)}"
    unbroken = meshes.run([{"name": f"unbroken-{name}", "ranks": 1, "recipe": recipe, "overrides": [steps]}])[f"unbroken-{name}"]
    assert "error" not in unbroken, unbroken["error"]
    for number, (mesh, ranks, overrides) in enumerate(links):
        job = {"name": f"{name}-{mesh}", "ranks": ranks, "recipe": recipe, "run": f"chain-{name}", "resume": number > 0}
        save = ["checkpoint.every=100", "checkpoint.keep_last=1"]
        stop = {"stop_at": EACH * (number + 1)} if number < len(links) - 1 else {}
        answer = meshes.run([{**job, "overrides": [steps, *save, *overrides], **stop}])[job["name"]]
        assert "error" not in answer, f"{mesh}: {answer['error']}"
        assert len(answer["steps"]) == EACH * (number + 1), f"{mesh}: it began anew"
        for step in range(EACH * number + 1, EACH * (number + 1) + 1):
            for what, value in unbroken["steps"][str(step)].items():
                assert answer["steps"][str(step)][what] == pytest.approx(value, rel=TOLERANCE), f"{mesh}: {what} of step {step}"
    assert answer["evaluation"] == pytest.approx(unbroken["evaluation"], rel=TOLERANCE)


@pytest.mark.parametrize("recipe", ["llama_tied", "deepseek_tied"])
def test_a_hugging_face_folder_is_that_of_one_process(recipe: str, meshes: Meshes, tmp_path: Path) -> None:
    import torch
    from intarsia.cli import main
    from safetensors.torch import load_file

    overrides = ["train.steps=2", "checkpoint.every=100", "evaluation.every=0"]
    places = {"one": (1, ()), "mesh": (4, ("mesh.pp=2", "mesh.tp=2", *PIPELINE)), "stages": (2, ("mesh.pp=2", *PIPELINE))}
    tensors = {}
    for place, (ranks, mesh) in places.items():
        name = f"export-{recipe}-{place}"
        answer = meshes.run([{"name": name, "ranks": ranks, "recipe": recipe, "overrides": [*overrides, *mesh]}])[name]
        assert "error" not in answer, answer["error"]
        assert main(["checkpoint", "export", str(meshes.folder / "runs" / name), str(tmp_path / place), "--to", "hf"]) == 0
        tensors[place] = {key: value for file in (tmp_path / place).glob("*.safetensors") for key, value in load_file(file).items()}
    one = tensors["one"]
    assert "model.embed_tokens.weight" in one and "lm_head.weight" not in one
    for place in ("mesh", "stages"):
        assert set(tensors[place]) == set(one)
        for name, value in one.items():
            torch.testing.assert_close(tensors[place][name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
