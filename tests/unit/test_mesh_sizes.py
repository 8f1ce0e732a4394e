"""Degrees of parallelism: numbers in every message, no torch needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from intarsia.comm import FakeCommunicator, SelfCommunicator
from intarsia.config import MeshConfig
from intarsia.errors import UsageError
from intarsia.mesh import Mesh, check_mesh


def test_minus_one_takes_what_is_left() -> None:
    assert check_mesh(MeshConfig(), 6)["dp_shard"] == 6
    assert check_mesh(MeshConfig(dp_replicate=2, tp=3), 12) == {"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 3, "ep": 1}


@pytest.mark.parametrize(
    ("config", "world", "words"),
    [
        (MeshConfig(dp_shard=2, tp=3), 4, ["dp_shard 2 x tp 3", "needs 6 processes", "there are 4", "--nproc-per-node 6"]),
        (MeshConfig(dp_replicate=3), 4, ["4 processes", "dp_replicate 3", "does not divide 4"]),
        (MeshConfig(dp_shard=2), 1, ["needs 2 processes", "there is 1"]),
        (MeshConfig(cp=0), 1, ["mesh.cp is 0", "at least 1"]),
        (MeshConfig(dp_shard=-2), 1, ["mesh.dp_shard is -2", "or -1"]),
        (MeshConfig(tp=3), 64, ["shared out: tp 3 does not divide 64, so nothing"]),
        (MeshConfig(tp=3, cp=2), 64, ["shared out: cp 2 x tp 3 = 6 does not divide 64, so nothing"]),
        (MeshConfig(dp_shard=2, cp=3, ep=4), 6, ["ep 4", "dp_shard 2 x cp 3 x tp 1 = 6", "divisors of 6, or another dp_shard, cp or tp"]),
    ],
)
def test_messages_hold_the_numbers(config: MeshConfig, world: int, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        check_mesh(config, world)
    for word in words:
        assert word in str(caught.value)


def test_coordinates_are_row_major_and_groups_partition_the_world() -> None:
    sizes = check_mesh(MeshConfig(pp=2, dp_replicate=2, dp_shard=2, cp=1, tp=2, ep=4), 16)
    meshes = [Mesh(sizes, FakeCommunicator(rank, 16)) for rank in range(16)]
    assert [mesh.coordinates["tp"] for mesh in meshes] == [0, 1] * 8
    assert [mesh.coordinates["pp"] for mesh in meshes] == [0] * 8 + [1] * 8
    assert [mesh.coordinates["ep"] for mesh in meshes] == [0, 1, 2, 3] * 4
    assert [mesh.data_rank for mesh in meshes[:8]] == [0, 0, 1, 1, 2, 2, 3, 3] and meshes[0].data_ranks == 4
    for mesh in meshes:
        both = mesh.comm("dp_shard", "dp_replicate")
        assert (both.size, both.rank) == (4, mesh.data_rank) and mesh.comm("dp_replicate", "dp_shard") is both
        assert (mesh.comm("ep").size, mesh.comm("ep").rank) == (4, mesh.coordinates["ep"])
        assert mesh.comm("cp").size == 1 and isinstance(mesh.comm("cp"), SelfCommunicator)
        assert mesh.comm("pp", "dp_replicate", "dp_shard", "tp") is mesh.world
    with pytest.raises(UsageError, match="'dp_shard'"):
        meshes[0].comm("dp_shrad")
    with pytest.raises(UsageError, match="folded"):
        meshes[0].comm("ep", "tp")
    with pytest.raises(UsageError, match="4 processes"):
        Mesh(sizes, FakeCommunicator(0, 4))


def test_the_block_is_the_expert_groups_times_their_complement() -> None:
    """A grid of (ep_shard, ep) over each block dp_shard x cp x tp: every two ranks of a block meet through exactly one rank."""
    sizes = check_mesh(MeshConfig(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2, ep=4), 48)
    for rank in range(48):
        mesh = Mesh(sizes, FakeCommunicator(rank, 48))
        assert (mesh.sizes["ep"], mesh.sizes["ep_shard"]) == (4, 3)
        assert (mesh.coordinates["ep"], mesh.coordinates["ep_shard"]) == (rank % 4, rank % 12 // 4)
        shards = mesh.comm("ep_shard")
        assert (shards.size, shards.rank) == (3, mesh.coordinates["ep_shard"])
        assert (mesh.comm("ep").size, mesh.comm("ep").rank) == (4, mesh.coordinates["ep"])
    with pytest.raises(UsageError, match="'ep_shard' are folded"):
        mesh.comm("ep_shard", "dp_replicate")
    whole = Mesh(check_mesh(MeshConfig(dp_shard=4), 4), FakeCommunicator(3, 4))
    assert whole.sizes["ep_shard"] == 4 and whole.comm("ep_shard") is whole.world


def test_expert_groups_are_partitions_of_the_world() -> None:
    groups: list[list[list[int]]] = []

    class Recording(FakeCommunicator):
        def split(self, groups_: list[list[int]], name: str) -> FakeCommunicator:
            groups.append(groups_)
            return super().split(groups_, name)

    mesh = Mesh(check_mesh(MeshConfig(dp_replicate=2, dp_shard=3, tp=2, ep=2), 12), Recording(0, 12))
    mesh.comm("ep")
    mesh.comm("ep_shard")
    assert groups == [
        [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]],
        [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]],
    ]


def test_checking_imports_no_torch() -> None:
    code = "import sys; from intarsia.mesh import check_mesh; from intarsia.config import MeshConfig; check_mesh(MeshConfig(), 2); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0
