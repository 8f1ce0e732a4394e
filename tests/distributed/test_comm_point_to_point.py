"""Sending from rank to rank: gloo, the ranks that are threads, and the groups in which there is nobody to send to."""

from __future__ import annotations

import pytest
import torch
from _spawn import spawn
from intarsia.comm import Communicator, FakeCommunicator, SelfCommunicator
from intarsia.errors import DistributedError
from intarsia_testing.communicator import run_ranks

DTYPES = ("float64", "float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "uint8")


def ring(world: Communicator) -> list[str]:
    """Every rank sends to the next, of every dtype and of shapes from nothing to three dimensions, all begun before any is waited for."""
    wrong, works, received = [], [], []
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def made(rank: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, (rank + len(shape)) % 2 if dtype == "bool" else rank + len(shape)).to(getattr(torch, dtype))

    cases = [(dtype, shape) for dtype in DTYPES for shape in ((), (3,), (2, 0), (2, 3, 4))]
    for dtype, shape in cases:
        works.append(world.send(made(world.rank, dtype, shape), following, "test send"))
        buffer = torch.zeros(shape).to(getattr(torch, dtype))
        works.append(world.receive(buffer, before, "test receive"))
        received.append(buffer)
    for work in reversed(works):
        work.wait()
        work.wait()
    for (dtype, shape), buffer in zip(cases, received, strict=True):
        if not torch.equal(buffer.float(), made(before, dtype, shape).float()):
            wrong.append(f"{dtype} {shape}: {buffer}")
    bytes_ = sum(buffer.nbytes for buffer in received)
    stats = world.stats()
    if (stats["test send"].calls, stats["test send"].bytes) != (len(cases), 0):
        wrong.append(f"statistics of send: {stats['test send']}")
    if (stats["test receive"].calls, stats["test receive"].bytes) != (len(cases), bytes_):
        wrong.append(f"statistics of receive: {stats['test receive']}")
    return wrong


def in_order(world: Communicator) -> list[float]:
    """What rank 1 gets of ten equal-looking sends, while it and rank 0 take part in a collective in between and rank 2 in nothing else."""
    got = []
    works = []
    for number in range(10):
        if world.rank == 0:
            works.append(world.send(torch.tensor([float(number)]), 1))
        if world.rank == 1:
            buffer = torch.zeros(1)
            works.append(world.receive(buffer, 0))
            got.append(buffer)
        if number == 5:
            world.all_reduce(torch.ones(1))
    for work in works:
        work.wait()
    return [float(each) for each in got]


def parts(world: Communicator) -> float:
    """Ranks are counted within the group: in the part {1, 3} of four, rank 1 sends to its rank 1."""
    mine = world.split([[0, 2], [1, 3]], "pair")
    buffer = torch.full((2,), float(world.rank))
    (mine.send(buffer, 1) if mine.rank == 0 else mine.receive(buffer, 0)).wait()
    return float(buffer[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_by_gloo_is_exact_and_counted(ranks: int) -> None:
    assert spawn(ring, ranks) == [[]] * ranks


def test_calls_between_two_ranks_are_matched_in_their_order() -> None:
    assert spawn(in_order, 3) == [[], [float(number) for number in range(10)], []]


def test_check_mode_lets_pairs_of_ranks_be() -> None:
    assert spawn(in_order, 3, environment={"INTARSIA_CHECK_COLLECTIVES": "1"})[1] == [float(number) for number in range(10)]


def test_ranks_are_those_of_the_group() -> None:
    assert spawn(parts, 4) == [0.0, 1.0, 0.0, 1.0] and run_ranks(4, parts) == [0.0, 1.0, 0.0, 1.0]


def test_ranks_as_threads_do_the_same() -> None:
    assert run_ranks(2, ring) == [[]] * 2 and run_ranks(3, ring) == [[]] * 3
    assert run_ranks(3, in_order)[1] == [float(number) for number in range(10)]


def test_what_is_sent_is_what_it_was_when_it_was_sent() -> None:
    def work(world: Communicator) -> float:
        buffer = torch.ones(1)
        if world.rank == 0:
            world.send(buffer, 1).wait()
            buffer.zero_()
            world.barrier()
        else:
            world.barrier()
            buffer = torch.zeros(1)
            world.receive(buffer, 0).wait()
        return float(buffer)

    assert run_ranks(2, work) == [0.0, 1.0]


def test_who_is_not_sent_to_is_told_whom_it_waited_for() -> None:
    def work(world: Communicator) -> None:
        if world.rank == 1:
            world.world.timeout_s = 0.2  # type: ignore[attr-defined]
            world.receive(torch.zeros(1), 0, "boundary").wait()

    with pytest.raises(DistributedError, match=r"Rank 0 has not sent its tensor 0 to rank 1 within 0\.2 s"):
        run_ranks(2, work)


@pytest.mark.parametrize(
    ("comm", "peer", "tensor"),
    [
        (SelfCommunicator(), 0, torch.ones(2)),
        (SelfCommunicator(), 1, torch.ones(2)),
        (FakeCommunicator(1, 4), 4, torch.ones(2)),
        (FakeCommunicator(1, 4), 2, torch.ones(2, 3).t()),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(comm: Communicator, peer: int, tensor: torch.Tensor) -> None:
    for call in (comm.send, comm.receive):
        with pytest.raises(DistributedError, match=rf"'boundary' on rank {comm.rank} of group '{comm.name}'.*the other rank is {peer}"):
            call(tensor, peer, "boundary")


def test_a_group_that_does_not_exist_sends_to_nobody() -> None:
    comm = FakeCommunicator(0, 2)
    buffer = torch.ones(3)
    comm.send(buffer, 1, "s").wait()
    comm.receive(buffer, 1, "r").wait()
    assert buffer.tolist() == [1.0] * 3 and comm.stats()["r"].bytes == 12
