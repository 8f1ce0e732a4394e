"""Prepared collectives in real gloo worlds: what they mean, what they count, and what is said when ranks do not do the same."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from _spawn import alone_within, spawn
from intarsia.comm import Communicator, FakeCommunicator, Prepared, PreparedReduce, SelfCommunicator
from intarsia.errors import DistributedError, UsageError

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)


def sizes(ranks: int) -> list[list[int]]:
    """Even, uneven, all on one rank (the last, the first), none."""
    uneven = [(rank * 3 + 1) % 5 for rank in range(ranks)]
    return [[4] * ranks, uneven, [0] * (ranks - 1) + [3], [5] + [0] * (ranks - 1), [0] * ranks]


def gathers(comm: Communicator) -> list[str]:
    wrong, me = [], comm.rank
    for dtype in DTYPES:
        for counts in sizes(comm.size):
            for in_place in (False, True):
                # Poisoned: whatever is not written shows.
                full = torch.full((sum(counts) * dtype.itemsize,), 77, dtype=torch.uint8).view(dtype)
                local = full.split(counts)[me] if in_place else torch.empty(counts[me], dtype=dtype)
                prepared = comm.prepare_gather(local, full, counts, f"gather {dtype} {counts} {in_place}")
                for run in range(3):
                    local.copy_(torch.arange(counts[me]).add(me + 2 * run).to(dtype))
                    prepared.start()
                    prepared.wait()
                    wanted = torch.cat([torch.arange(count).add(rank + 2 * run) for rank, count in enumerate(counts)])
                    if full.long().tolist() != wanted.tolist():
                        wrong.append(f"{prepared.what}, run {run}: {full} instead of {wanted}")
                statistic = comm.stats()[prepared.what]
                received = (sum(counts) - counts[me]) * dtype.itemsize
                if (prepared.bytes, statistic.calls, statistic.bytes) != (received, 3, 3 * received):
                    wrong.append(f"{prepared.what}: {prepared.bytes} bytes, {statistic}")
    return wrong


def reductions(comm: Communicator) -> list[str]:
    wrong, me, size = [], comm.rank, comm.size
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for counts in sizes(size):
            for spare in (None, 0, 7):
                full, mine = torch.empty(sum(counts), dtype=dtype), counts[me]
                scratch = None if spare is None else torch.empty(size * mine + spare, dtype=dtype)
                out = torch.empty(mine, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
                seen: list[tuple[int, bool, bool]] = []

                def combine(
                    parts: Any, out: torch.Tensor, full: torch.Tensor = full, seen: Any = seen, own: int = sum(counts[:me])
                ) -> None:
                    seen.append(
                        (
                            len(parts),
                            all(part.dtype == full.dtype and part.numel() == out.numel() for part in parts),
                            not out.numel() or parts[me].data_ptr() == full[own:].data_ptr(),
                        )
                    )
                    # Depends on the order of ranks.
                    out.copy_(sum(part.double() * 10**rank for rank, part in enumerate(parts)))

                summed = comm.prepare_reduce_scatter(full, counts, f"sum {dtype} {counts} {spare}", scratch=scratch)
                ordered = comm.prepare_reduce_scatter(full, counts, f"ordered {dtype} {counts} {spare}", combine)
                for run in range(2):
                    contributions = [
                        torch.arange(sum(counts)).remainder(3).add(rank % 2 + run).double().split(counts)[me] for rank in range(size)
                    ]
                    full.copy_(torch.arange(sum(counts)).remainder(3).add(me % 2 + run))
                    for prepared, weights in ((summed, [1] * size), (ordered, [10**rank for rank in range(size)])):
                        out.fill_(99)
                        prepared.start(out)
                        prepared.wait()
                        wanted = sum(weight * each for weight, each in zip(weights, contributions, strict=True))
                        if out.double().tolist() != wanted.tolist():
                            wrong.append(f"{prepared.what}, run {run}: {out} instead of {wanted}")
                if set(seen) != {(size, True, True)}:
                    wrong.append(f"{ordered.what}: parts {seen}")
                if summed.bytes != (size - 1) * mine * dtype.itemsize:
                    wrong.append(f"{summed.what}: {summed.bytes} bytes")
    return wrong


def everything(world: Communicator) -> list[str]:
    copy = world.duplicate("copy")
    return gathers(world) + reductions(copy)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_they_mean_the_same_on_any_number_of_processes(ranks: int) -> None:
    assert spawn(everything, ranks) == [[]] * ranks


def test_both_kinds_and_groups_overlap(ranks: int = 3) -> None:
    assert spawn(overlapped, ranks) == [[]] * ranks


def test_a_call_that_outlasts_a_profiler_is_not_recorded_by_it() -> None:
    assert spawn(profiled, 2)[0] == ["aten::sin"]


def profiled(world: Communicator) -> list[str]:
    """Rank 0's part of a gather begins under a profiler and ends after it, when its end could only be written into memory that has been given back."""
    comm = world.duplicate("gather")
    local, full = torch.full((4,), float(comm.rank)), torch.zeros(8)
    gather = comm.prepare_gather(local, full, [4, 4], "late")
    names = []
    if comm.rank == 0:
        with torch.profiler.profile() as profiler:
            gather.start()
            torch.ones(3).sin()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            found = json.loads(path.read_text())["traceEvents"]
        names = [event["name"] for event in found if event["name"] == "aten::sin" or event["name"].startswith("gloo:")]
        del profiler
    world.barrier()
    if comm.rank == 1:
        gather.start()
    gather.wait()
    assert full.tolist() == [0.0] * 4 + [1.0] * 4
    return names


def overlapped(world: Communicator) -> list[str]:
    """All are started before any is waited for, in two groups, the reductions waited for first."""
    wrong, me, size = [], world.rank, world.size
    gather, reduce = world.duplicate("gather"), world.duplicate("reduce")
    counts = [2, 0, 5]
    fulls = [torch.full((7,), -1.0) for _ in range(4)]
    locals_ = [torch.full((counts[me],), 10.0 * number + me) for number in range(4)]
    sources = [torch.full((7,), float(number + me)) for number in range(4)]
    outs = [torch.empty(counts[me]) for _ in range(4)]
    prepared = [gather.prepare_gather(local, full, counts, "unshard") for local, full in zip(locals_, fulls, strict=True)]
    reductions = [reduce.prepare_reduce_scatter(source, counts, "reduce") for source in sources]
    for one, other, out in zip(prepared, reductions, outs, strict=True):
        one.start()
        other.start(out)
    for other in reductions:
        other.wait()
    for one in prepared:
        one.wait()
    for number in range(4):
        if fulls[number].tolist() != [10.0 * number + rank for rank in range(size) for _ in range(counts[rank])]:
            wrong.append(f"gather {number}: {fulls[number]}")
        if outs[number].tolist() != [3.0 * number + 3] * counts[me]:
            wrong.append(f"reduce {number}: {outs[number]}")
    statistic = gather.stats()["unshard"]
    if statistic.calls != 4 or not statistic.seconds > 0 or "unshard" in reduce.stats():
        wrong.append(str(statistic))
    return wrong


def test_groups_of_one_name_do_not_see_each_other() -> None:
    spawn(twice, 2, environment={"INTARSIA_CHECK_COLLECTIVES": "1"})


def twice(world: Communicator) -> None:
    first, second = world.duplicate("copy"), world.duplicate("copy")
    second.barrier("of the second")
    for _ in range(3):
        first.barrier("of the first")
    second.barrier("of the second")


def test_groups_beside_each_other_are_duplicated_apart() -> None:
    assert spawn(beside, 4) == [[[0, 1], [0, 1]], [[0, 1], [0, 1]], [[2, 3], [2, 3]], [[2, 3], [2, 3]]]


def beside(world: Communicator) -> list[list[int]]:
    part = world.split([[0, 1], [2, 3]], "shards")
    found = []
    for name in ("gather", "reduce"):
        full = torch.zeros(2, dtype=torch.int64)
        prepared = part.duplicate(name).prepare_gather(torch.tensor([world.rank]), full, [1, 1], name)
        prepared.start()
        prepared.wait()
        found.append(full.tolist())
    return found


# ---------------------------------------------------------------- alone, and planned


@pytest.mark.parametrize("comm", [SelfCommunicator(), FakeCommunicator(0, 1)])
def test_alone_nothing_is_moved(comm: Communicator) -> None:
    assert gathers(comm) + reductions(comm) == []


def test_a_fake_group_counts_and_has_its_own_part() -> None:
    comm = FakeCommunicator(1, 3)
    full, out = torch.full((6,), 9.0), torch.empty(2)
    gather = comm.prepare_gather(torch.ones(2), full, [3, 2, 1], "unshard")
    reduce = comm.prepare_reduce_scatter(torch.arange(6.0), [3, 2, 1], "reduce")
    for prepared, arguments in ((gather, ()), (reduce, (out,))):
        prepared.start(*arguments)  # type: ignore[arg-type]
        prepared.wait()
    assert full.tolist() == [0, 0, 0, 1, 1, 0] and out.tolist() == [3, 4]
    assert (comm.stats()["unshard"].bytes, comm.stats()["reduce"].bytes) == (16, 16)
    meta = FakeCommunicator(1, 3, "meta")
    meta.prepare_gather(meta.empty(2, torch.bfloat16), meta.empty(6, torch.bfloat16), [3, 2, 1], "unshard").start()
    assert meta.stats()["unshard"].bytes == 8


def test_buffers_that_do_not_fit_are_told() -> None:
    comm = FakeCommunicator(0, 2, name="dp")
    for local, full, counts, words in (
        (torch.zeros(2), torch.zeros(5), [2, 2], r"'unshard' on rank 0 .*\(5,\) does not match the counts \[2, 2\]"),
        (torch.zeros(3), torch.zeros(4), [2, 2], r"\(3,\) does not match"),
        (torch.zeros(2), torch.zeros(2, 2), [2, 2], "must be 1-D"),
        (torch.zeros(2), torch.zeros(4), [4], "does not match"),
        (torch.zeros(2), torch.zeros(4).half(), [2, 2], "torch.float32 on cpu and of torch.float16 on cpu"),
    ):
        with pytest.raises(DistributedError, match=words):
            comm.prepare_gather(local, full, counts, "unshard")
    with pytest.raises(DistributedError, match="one dtype"):
        comm.prepare_reduce_scatter(torch.zeros(4), [2, 2], "reduce", scratch=torch.zeros(4).half())
    # One element would go into any number of them.
    for out in (torch.zeros(7), torch.zeros(0)):
        with pytest.raises(RuntimeError, match="invalid for input of size 1"):
            comm.prepare_reduce_scatter(torch.zeros(2), [1, 1], "reduce").start(out)


# ---------------------------------------------------------------- ranks that differ


def differ(world: Communicator, kind: str) -> None:
    counts = [2, 2] if world.rank or kind != "sizes" else [1, 2]
    full = torch.zeros(sum(counts))
    name = f"unshard layers.{world.rank if kind == 'names' else 0}"
    gather = world.prepare_gather(torch.zeros(counts[world.rank]), full, counts, name)
    if kind == "kinds" and world.rank:
        world.prepare_reduce_scatter(full, counts, "reduce layers.0").start(torch.zeros(2))
    elif kind == "absent":
        with alone_within(world, 2.0) as alone:
            if alone:
                gather.start()
                gather.wait()
    else:
        gather.start()
        gather.wait()
        if kind == "again":
            gather.start()
            gather.start()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sizes", ["different sizes", "gather 'unshard layers.0'", "sizes [1, 2]", "sizes [2, 2]"]),
        ("names", ["different what", "rank 0 calls gather 'unshard layers.0'", "rank 1 calls gather 'unshard layers.1'"]),
        ("kinds", ["different call", "rank 0 calls gather 'unshard layers.0'", "rank 1 calls reduce 'reduce layers.0'"]),
    ],
)
def test_in_check_mode_both_sides_are_told(kind: str, words: list[str]) -> None:
    for result in spawn(differ, 2, kind, errors=True, environment={"INTARSIA_CHECK_COLLECTIVES": "1"}):
        assert result["error"] == "DistributedError"
        for word in words:
            assert word.lower() in result["message"].lower()


@pytest.mark.parametrize("check", ["0", "1"])
def test_a_missing_rank_is_named_within_the_limit(check: str) -> None:
    results = spawn(differ, 2, "absent", errors=True, environment={"INTARSIA_CHECK_COLLECTIVES": check})
    assert results[0]["error"] == "DistributedError" and "did not finish within 2 s" in results[0]["message"]
    assert "gather 'unshard layers.0'" in results[0]["message"] and "group 'world'" in results[0]["message"]
    assert ("rank 1 is at collective 1, all_reduce 'all are here'" if check == "1" else "rank 1 said nothing") in results[0]["message"]


def test_a_second_start_without_a_wait_is_refused() -> None:
    for result in spawn(differ, 2, "again", errors=True):
        assert result["error"] == "DistributedError" and "'unshard layers.0' in group 'world' was started again before" in result["message"]


# ---------------------------------------------------------------- the watcher of devices, with events that need none


class Event:
    """An end of device work that passes when it is told to."""

    def __init__(self, is_over: bool = False) -> None:
        self.is_over = is_over

    def query(self) -> bool:
        return self.is_over


def watched(world: Communicator) -> dict[str, Any]:
    watcher = world.watcher  # type: ignore[attr-defined]
    part = world.duplicate("unshard")
    assert part.watcher is watcher  # type: ignore[attr-defined]
    # The test looks itself: the thread needs a driver to ask.
    watcher._thread = object()
    part.watch_event(Event(True), {"call": "gather", "what": "unshard layers.0", "sizes": [1, 2], "number": 1})
    part.watch_event(Event(), {"call": "gather", "what": "unshard layers.1", "sizes": [1, 2], "number": 2})
    part.watch_event(Event(), {"call": "gather", "what": "unshard layers.2", "sizes": [1, 2], "number": 3})
    result: dict[str, Any] = {"at once": watcher.look(), "error": watcher.error}
    with alone_within(world, 1.0) as alone:
        if alone:
            time.sleep(1.1)
            result["late"] = watcher.look()
            try:
                world.barrier("after it")
            except DistributedError as error:
                result["message"] = str(error)
    return result


def test_a_device_call_that_does_not_finish_is_named_and_ends_every_later_call() -> None:
    first, second = spawn(watched, 2)
    assert first["at once"] and first["error"] is None and second["error"] is None
    assert not first["late"]
    for words in (
        "group 'unshard'",
        "collective 2, gather 'unshard layers.1' (sizes [1, 2])",
        "rank 1 said nothing",
        "the device has not finished it",
    ):
        assert words in first["message"]


# ---------------------------------------------------------------- transports


class Sent(Prepared):
    """A transport's gather that says it ran."""

    def start(self) -> None:
        self.begin()


class Summed(PreparedReduce):
    def start(self, out: torch.Tensor) -> None:
        self.begin()
        out.fill_(5)


class Doubling:
    """A transport that gathers from its own memory only."""

    name, bytes_allocated = "doubling", 0

    def __init__(self) -> None:
        self.memory: list[int] = []
        self.fences = 0

    def check(self, comm: Communicator) -> None:
        if comm.size > 2:
            raise UsageError("Transport doubling needs two ranks.")

    def empty(self, comm: Communicator, numel: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(numel, dtype=dtype)
        self.memory.append(made.data_ptr())
        self.bytes_allocated += made.nbytes
        return made

    def prepare_gather(self, comm: Communicator, local: torch.Tensor, full: torch.Tensor, counts: Any, what: str) -> Prepared | None:
        return Sent(comm, "gather", what, full, counts, 1) if local.data_ptr() in self.memory else None

    def prepare_reduce_scatter(
        self, comm: Communicator, full: torch.Tensor, counts: Any, what: str, combine: Any, scratch: Any
    ) -> PreparedReduce | None:
        return Summed(comm, "reduce", what, full, counts, 2)

    def fence(self, comm: Communicator) -> None:
        self.fences += 1


def with_transport(world: Communicator) -> list[Any]:
    transport = Doubling()
    comm = world.duplicate("fast", transport)  # type: ignore[arg-type]
    mine, full, out = comm.empty(2, torch.float32, "shards"), torch.zeros(4), torch.zeros(2)
    comm.prepare_gather(mine, full, [2, 2], "unshard").start()
    plain = comm.prepare_gather(torch.ones(2), full, [2, 2], "plain")
    plain.start()
    plain.wait()
    comm.prepare_reduce_scatter(full, [2, 2], "reduce").start(out)
    comm.fence("update")
    stats = comm.stats()
    return [
        full.tolist(), out.tolist(), transport.fences, transport.bytes_allocated,
        [(stats[name].calls, stats[name].bytes) for name in ("unshard", "plain", "reduce", "update")],
    ]  # fmt: skip


def test_a_transport_stands_before_the_group_and_is_counted_alike() -> None:
    assert spawn(with_transport, 2) == [[[1.0] * 4, [5.0, 5.0], 1, 8, [[1, 1], [1, 8], [1, 2], [1, 0]]]] * 2


def refused(world: Communicator) -> None:
    world.duplicate("fast", Doubling())  # type: ignore[arg-type]


def test_a_transport_says_what_it_lacks() -> None:
    for result in spawn(refused, 3, errors=True):
        assert (result["error"], result["message"]) == ("UsageError", "Transport doubling needs two ranks.")


def test_alone_a_transport_is_left_out() -> None:
    comm = SelfCommunicator().duplicate("fast", Doubling())  # type: ignore[arg-type]
    comm.fence()
    assert comm.transport is None and comm.empty(3, torch.int16).shape == (3,) and comm.stats() == {}
