"""A language model that sees, on meshes: losses and every gradient, the vision tower's among them, are those of one process, with images on some ranks, on one, and on none.

Whole: each rank runs the tower on all images of its rows. Shared: ranks that hold parts of the same rows deal the frames out. Balanced: all ranks of a stage do. FlexShard shards in debug mode; float32 over gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from _meshes import Meshes

TOLERANCE = 1e-5
DP2, TP2, CP2, PP2 = {"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}
TOWER = ("visual.*",)


def job(mesh: dict[str, int], vision: str = "whole", images: str = "uneven", **further: Any) -> dict[str, Any]:
    """One of `_vision`."""
    ranks = 1
    for size in mesh.values():
        ranks *= size
    name = " ".join([*(f"{axis}{size}" for axis, size in mesh.items()), vision, images, *further])
    return {"name": name, "call": "_vision:run", "ranks": ranks, "mesh": mesh, "vision": vision, "images": images, **further}


JOBS = {
    each["name"]: each
    for each in [
        job(DP2),
        job(DP2, images="one rank has none"),
        job(DP2, images="one rank has none", recompute=True),
        job(DP2, images="one rank has none", frozen=TOWER),
        job(DP2, images="nobody has any"),
        job(DP2, images="text"),
        job(TP2),
        job(TP2, "shared"),
        job(TP2, "shared", "nobody has any"),
        job(TP2, "shared", frozen=TOWER),
        job(CP2),
        job(CP2, "shared"),
        job(CP2, "shared", "one rank has none", recompute=True),
        job(PP2),
        job(PP2, images="one rank has none", recompute=True),
        job({**TP2, **CP2}),
        job({**TP2, **CP2}, "shared"),
        job({**DP2, **TP2}, "shared", "one rank has none"),
        job({**PP2, **TP2}, "shared"),
        job(DP2, "balanced"),
        job(DP2, "balanced", "one rank has none", recompute=True),
        job(DP2, "balanced", "one rank has none", frozen=TOWER),
        job(DP2, "balanced", "nobody has any"),
        job(DP2, "balanced", "text"),
        job(CP2, "balanced"),
        job({"dp_replicate": 2, **DP2}, "balanced"),
        job({**DP2, **TP2}, "balanced", "one rank has none"),
        job({**DP2, **CP2}, "balanced"),
    ]
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """All runs, one after another on four processes that stay."""
    with Meshes(tmp_path_factory.mktemp("vision"), 4) as meshes:
        yield meshes.run(list(JOBS.values()))


@pytest.mark.parametrize("name", JOBS)
def test_a_mesh_equals_one_process(name: str, answers: dict[str, Any]) -> None:
    found = answers[name]
    assert "error" not in found, found["error"]
    for rank in found["by_rank"]:
        assert rank["worst"] < TOLERANCE
        assert rank["loss"] < TOLERANCE
    names = {each for rank in found["by_rank"] for each in rank["names"]}
    assert names == set(found["by_rank"][0]["expected"])
    tower = found["by_rank"][0]["tower"]
    if "frozen" in JOBS[name]:
        assert not tower
    else:
        assert len(tower) == 69
        # No image, no gradient, but a gradient of zeros: every rank has taken part.
        assert (max(tower.values()) == 0.0) == ("nobody" in name or "text" in name)
