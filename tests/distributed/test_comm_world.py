"""The communicator in real gloo worlds: true sizes, every dtype, statistics, agreement, and divergence as an error in bounded time."""

from __future__ import annotations

import json
import math
import os
import time
import weakref
from pathlib import Path

import pytest
import torch
from _spawn import alone_within, spawn
from intarsia.comm import Communicator, FakeCommunicator, SelfCommunicator, init_world
from intarsia.config import MeshConfig
from intarsia.errors import DistributedError, UsageError
from intarsia.mesh import Mesh, check_mesh

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")
MOVED_ONLY = ("float8_e4m3fn", "bool")


def collectives(world: Communicator) -> list[str]:
    """Every collective against its meaning, for uneven and empty sizes; the names of what is wrong."""
    wrong = []
    me, size = world.rank, world.size

    def expect(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        if got.dtype != wanted.dtype or not torch.equal(got, wanted):
            wrong.append(f"{name}: {got} instead of {wanted}")

    for dtype_name in (*DTYPES, *MOVED_ONLY):
        dtype = getattr(torch, dtype_name)
        for counts in ([3] * size, [(rank * 5 + 1) % 4 for rank in range(size)], [0] * (size - 1) + [2], [0] * size):
            parts = [
                torch.arange(count).add(rank).remainder(2 if dtype_name == "bool" else 100).to(dtype) for rank, count in enumerate(counts)
            ]
            expect(f"gather {dtype_name} {counts}", world.gather_v(parts[me], counts, "test gather"), torch.cat(parts))
            matrix = [[(source + 2 * target) % 3 for target in range(size)] for source in range(size)]
            sends = [torch.full((matrix[me][target],), me + target).to(dtype) for target in range(size)]
            received = world.exchange(sends, [matrix[source][me] for source in range(size)], "test exchange")
            for source, got in enumerate(received):
                expect(f"exchange {dtype_name}", got, torch.full((matrix[source][me],), source + me).to(dtype))
            if dtype_name in MOVED_ONLY:
                continue
            whole = [torch.arange(sum(counts)).add(rank).to(dtype) for rank in range(size)]
            for op, combine in (("sum", torch.sum), ("max", torch.amax), ("min", torch.amin)):
                combined = combine(torch.stack([each.double() for each in whole]), dim=0).to(dtype)
                got = world.reduce_scatter_v(whole[me].clone(), counts, op, "test reduce")
                expect(f"reduce {op} {dtype_name} {counts}", got, combined.split(counts)[me])
                expect(f"all_reduce {op} {dtype_name}", world.all_reduce(whole[me].clone(), op, "test all_reduce"), combined)
        tensor = torch.full((2, 2), me + 1).to(dtype)
        expect(f"broadcast {dtype_name}", world.broadcast(tensor, size - 1, "test broadcast"), torch.full((2, 2), size).to(dtype))
    expect("not contiguous", world.all_reduce(torch.ones(3, 2).t(), "sum"), torch.full((2, 3), float(size)))
    if world.gather_json({"rank": me, "text": "ä" * me}) != [{"rank": rank, "text": "ä" * rank} for rank in range(size)]:
        wrong.append("gather_json")
    if world.broadcast_json({"from": me}, root=size - 1) != {"from": size - 1}:
        wrong.append("broadcast_json")
    world.agree({"plan": [1, 2, {"a": None}]}, "the plan")
    world.barrier()
    return wrong


def mesh_groups(world: Communicator, replicate: int, shard: int) -> list[object]:
    mesh = Mesh(check_mesh(MeshConfig(dp_replicate=replicate, dp_shard=shard), world.size), world)
    groups = [mesh.comm(), mesh.comm("dp_shard"), mesh.comm("dp_replicate"), mesh.comm("dp_shard", "dp_replicate"), mesh.comm("tp")]
    return [group.gather_json(world.rank) for group in groups] + [mesh.data_rank, mesh.data_ranks]


def everything(world: Communicator) -> dict[str, object]:
    result: dict[str, object] = {"wrong": collectives(world)}
    stats = {name: (each.calls, each.bytes) for name, each in world.stats().items()}
    result["stats"] = stats["test broadcast"]
    result["seconds"] = world.stats()["test gather"].seconds
    value = {"layers": 2, "buckets": [{"name": "root", "sizes": [1, 2]}, {"name": "layers.0", "sizes": [3, 3 if world.rank else 4]}]}
    try:
        world.agree(value, "the bucket plan")
    except DistributedError as error:
        result["disagree"] = str(error)
    if world.size == 4:
        result["mesh"] = mesh_groups(world, 2, 2)
    return result


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_mean_the_same_on_gloo(ranks: int) -> None:
    results = spawn(everything, ranks)
    for rank, result in enumerate(results):
        assert result["wrong"] == []
        calls, received = result["stats"]
        itemsizes = [getattr(torch, name).itemsize for name in (*DTYPES, *MOVED_ONLY)]
        assert calls == len(itemsizes) and received == (0 if rank == ranks - 1 else 4 * sum(itemsizes))
        assert result["seconds"] > 0
        message = result["disagree"]
        assert "the bucket plan" in message and "buckets.1.sizes.1" in message
        assert "rank 0: 4" in message and (f"ranks {', '.join(map(str, range(1, ranks)))}: 3" in message or "rank 1: 3" in message)
    if ranks == 4:
        meshes = [result["mesh"] for result in results]
        assert [each[0] for each in meshes] == [[0], [1], [2], [3]]
        assert [each[1] for each in meshes] == [[0, 1], [0, 1], [2, 3], [2, 3]]
        assert [each[2] for each in meshes] == [[0, 2], [1, 3], [0, 2], [1, 3]]
        assert all(each[3] == [0, 1, 2, 3] for each in meshes) and [each[5] for each in meshes] == [0, 1, 2, 3]


def diverge(world: Communicator, kind: str) -> None:
    world.all_reduce(torch.zeros(1), "sum", "before")
    if kind == "order" and world.rank == 1:
        world.gather_v(torch.zeros(2), [2, 2], "unshard layers.1")
    elif kind == "sizes" and world.rank == 1:
        world.all_reduce(torch.zeros(3), "sum", "gradient norm")
    elif kind == "exchange":
        world.exchange([torch.zeros(1), torch.zeros(1)], [1, 1 if world.rank else 2], "dispatch tokens")
    elif kind == "absent":
        with alone_within(world, 2.0) as alone:
            if alone:
                world.all_reduce(torch.zeros(2), "sum", "gradient norm")
    elif kind != "dead" or world.rank == 0:
        world.all_reduce(torch.zeros(2), "sum", "gradient norm")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("order", ["different call", "rank 0 calls all_reduce 'gradient norm'", "rank 1 calls gather_v 'unshard layers.1'"]),
        ("sizes", ["different sizes", "sizes [2]", "sizes [3]"]),
        ("exchange", ["rank 1 sends what rank 0 does not expect", "dispatch tokens"]),
    ],
)
def test_diverged_ranks_are_told_both_sides(kind: str, words: list[str]) -> None:
    results = spawn(diverge, 2, kind, errors=True, environment={"INTARSIA_CHECK_COLLECTIVES": "1"})
    for result in results:
        assert result["error"] == "DistributedError"
        for word in words:
            assert word.lower() in result["message"].lower()


@pytest.mark.parametrize("check", ["0", "1"])
def test_an_absent_rank_ends_the_wait_and_is_named(check: str) -> None:
    results = spawn(diverge, 2, "absent", errors=True, environment={"INTARSIA_CHECK_COLLECTIVES": check})
    assert results[0]["error"] == "DistributedError"
    message = results[0]["message"]
    assert "gradient norm" in message and "did not finish within 2 s" in message
    assert ("rank 1 is at collective 2, all_reduce 'all are here'" if check == "1" else "rank 1 said nothing") in message


def test_a_rank_that_has_ended_is_not_waited_for_and_no_limit_is_blamed() -> None:
    message = spawn(diverge, 2, "dead", errors=True)[0]["message"]
    assert "gradient norm" in message and "ended because another rank closed the connection" in message and "within" not in message


def limited(world: Communicator) -> list[float]:
    """The limits of a world, of parts made before and after it was changed, and of a group beside it."""
    part = world.split([[0], [1]], "part")
    inner = part.duplicate("inner")
    world.set_timeout(20.0)  # type: ignore[attr-defined]
    later = part.duplicate("later")
    part.set_timeout(10.0)  # type: ignore[attr-defined]
    return [each.timeout_s for each in (world, part, inner, later)]  # type: ignore[attr-defined]


def test_a_limit_is_that_of_all_parts() -> None:
    assert spawn(limited, 2) == [[20.0, 10.0, 10.0, 10.0]] * 2


def test_meeting_late_is_no_hang() -> None:
    """The limit of a call is no limit of how late a process may start or come to form a part."""
    assert spawn(late, 2, world=False) == [["world", "part"]] * 2


def late() -> list[str]:
    waits = os.environ["RANK"] == "1"
    time.sleep(1.5 if waits else 0.0)
    world = init_world("cpu", timeout_s=1.0)
    time.sleep(1.5 if waits else 0.0)
    part = world.split([[0, 1]], "part")
    names = [world.name, part.name]
    # No call is bounded here: this test is about what comes before them.
    world.set_timeout(300.0)  # type: ignore[attr-defined]
    part.barrier("the end")
    world.close()
    return names


class Graph:
    """What a communicator calls of a CUDA graph."""

    is_reset = False

    def reset(self) -> None:
        self.is_reset = True


def closed(world: Communicator) -> list[bool]:
    """Whether the groups of the world and of its parts are gone, and their graphs reset, once it is closed, though communicators are still held."""
    part = world.split([[0, 1]], "part")
    inner = part.split([[0], [1]], "inner")
    held = [world, part, inner]
    for each in held:
        each.all_reduce(torch.ones(1))
    groups = [weakref.ref(each.group) for each in held]  # type: ignore[attr-defined]
    graphs = [Graph() for _ in held]
    for each, graph in zip(held, graphs, strict=True):
        each.graphs.add(graph)
    world.close()
    world.close()
    return [group() is None and graph.is_reset for group, graph in zip(groups, graphs, strict=True)]


def test_closing_ends_every_group() -> None:
    """A group's threads end with its last reference: one that runs while the interpreter ends may abort the process."""
    assert spawn(closed, 2) == [[True] * 3] * 2


def test_self_and_fake() -> None:
    assert collectives(SelfCommunicator()) == []
    fake = FakeCommunicator(1, 3)
    assert fake.gather_v(torch.ones(2), [1, 2, 4], "x").tolist() == [0, 1, 1, 0, 0, 0, 0]
    assert fake.reduce_scatter_v(torch.arange(7.0), [1, 2, 4], "sum", "y").tolist() == [1, 2]
    assert [part.numel() for part in fake.exchange([torch.ones(1)] * 3, [2, 1, 5], "z")] == [2, 1, 5]
    assert fake.stats()["x"].bytes == 5 * 4 and fake.stats()["y"].bytes == 5 * 4 and fake.stats()["z"].bytes == 7 * 4
    assert fake.split([[0], [1, 2]], "part").size == 2
    assert fake.gather_v(torch.ones(2, device="meta"), [1, 2, 4]).shape == (7,)
    assert fake.gather_json(1) == [1, 1, 1]


def test_wrong_sizes_never_reach_a_backend() -> None:
    world = SelfCommunicator()
    for call in (
        lambda: world.gather_v(torch.ones(2), [3], "a"),
        lambda: world.gather_v(torch.ones(2, 2), [4], "a"),
        lambda: world.gather_v(torch.ones(4)[::2], [2], "a"),
        lambda: world.reduce_scatter_v(torch.ones(2), [1, 1], "sum", "a"),
        lambda: world.exchange([], [], "a"),
    ):
        with pytest.raises(DistributedError, match="'a'"):
            call()
    with pytest.raises(UsageError, match="sum, max, min"):
        world.all_reduce(torch.ones(1), "mean")


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "INTARSIA_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(init_world("cpu"), SelfCommunicator)
    # A GPU without a number is this process's own.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for rank, local, device in ((None, None, 0), (None, "3", 3), ("6", None, 2), ("6", "0", 0)):
        for name, value in {"RANK": rank, "WORLD_SIZE": rank and "1", "LOCAL_RANK": local}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        assert init_world("cuda").device == torch.device("cuda", device)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert init_world("cuda:1").device == torch.device("cuda:1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="torchrun"):
        init_world("cpu")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UsageError, match="RANK is 2, but WORLD_SIZE is 2"):
        init_world("cpu")
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(UsageError, match="whole number"):
        init_world("cpu")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        init_world("cpu")
    monkeypatch.setenv("INTARSIA_RENDEZVOUS", f"file://{tmp_path}/store")
    with pytest.raises(DistributedError, match="did not meet the others within 1 s"):
        init_world("cpu", meeting_s=1)
    monkeypatch.setenv("INTARSIA_MEETING_S", "2")
    with pytest.raises(DistributedError, match="did not meet the others within 2 s"):
        init_world("cpu")
    monkeypatch.setenv("INTARSIA_TIMEOUT_S", "soon")
    with pytest.raises(UsageError, match="INTARSIA_TIMEOUT_S must be a whole number"):
        init_world("cpu")


def test_json_stays_json() -> None:
    assert SelfCommunicator().gather_json({"a": [1, 2.5, None, "é"]}) == [{"a": [1, 2.5, None, "é"]}]
    with pytest.raises(TypeError):
        SelfCommunicator().gather_json(object())
    assert json.loads(json.dumps(math.pi)) == math.pi
