"""A model of Gated DeltaNet and attention on meshes: losses and every gradient are those of one process, wherever a row is cut. FlexShard shards; float32 over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from _linear import LENGTHS
from _meshes import Meshes

TOLERANCE = 1e-5
CP2, CP4, TP2, PP2, DP2 = {"cp": 2}, {"cp": 4}, {"tp": 2}, {"pp": 2}, {"dp_shard": 2}


def job(mesh: dict[str, int], lengths: str = "long", **further: Any) -> dict[str, Any]:
    """One of `_linear`."""
    ranks = 1
    for size in mesh.values():
        ranks *= size
    name = " ".join([*(f"{axis}{size}" for axis, size in mesh.items()), lengths, *further])
    return {"name": name, "call": "_linear:run", "ranks": ranks, "mesh": mesh, "lengths": lengths, **further}


JOBS = {
    each["name"]: each
    for each in [
        *(job(CP2, lengths) for lengths in ("long", "at borders", "short")),
        *(job(CP4, lengths) for lengths in LENGTHS),
        job(CP4, recompute=True),
        job(TP2),
        job(TP2, "at borders", recompute=True),
        job(PP2),
        job({**TP2, **CP2}),
        job({**PP2, **CP2}),
        job({**DP2, **TP2}),
    ]
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """All runs, one after another on four processes that stay."""
    with Meshes(tmp_path_factory.mktemp("linear"), 4) as meshes:
        yield meshes.run(list(JOBS.values()))


@pytest.mark.parametrize("name", JOBS)
def test_a_mesh_equals_one_process(name: str, answers: dict[str, Any]) -> None:
    found = answers[name]
    assert "error" not in found, found["error"]
    for rank in found["by_rank"]:
        assert max(rank["errors"].values()) < TOLERANCE, sorted(rank["errors"].items(), key=lambda item: -item[1])[:5]
        assert rank["loss"] < TOLERANCE
    assert {name for rank in found["by_rank"] for name in rank["errors"]} == set(found["by_rank"][0]["expected"])
