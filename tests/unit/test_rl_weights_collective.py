"""Weights over process groups: which backend is taken, what makes groups and what ends them, pieces of bounded size. Over gloo; `tests/gpu/test_rl_weights_nccl_gpu.py` has NCCL.

Waits that are to succeed may take minutes on a busy machine; those that are to fail wait for what nobody sends.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.contracts import Box
from intarsia.errors import DistributedError, UsageError
from intarsia.layout import slices
from intarsia.plugins import current
from intarsia_rl.contracts import WeightVersion
from intarsia_rl.weights import collective, reading, wire
from intarsia_rl.weights.collective import Collective, own_name, read, store_at, tensor_at
from intarsia_rl.weights.config import CollectiveConfig
from intarsia_rl.weights.fill import fill, filled_version, own_tensors
from intarsia_rl.weights.pair import READER, TRAINER, Pair, is_over, obstacle, receive_into, send_parts
from intarsia_testing.communicator import run_ranks
from intarsia_testing.strategies import example_settings
from intarsia_testing.weight_transport import SHAPES, Small, Trainer, published
from torch import Tensor

LONG_S = 300.0
CUDA = {"type": "cuda", "unit": "a", "nccl": True}
CPU = {"type": "cpu", "unit": "", "nccl": False}


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Collective]:
    made = Collective(CollectiveConfig(attempts=2, timeout_s=LONG_S, piece_bytes=64), tmp_path)
    yield made
    made.close()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Pair]:
    """The groups that readers make."""
    pairs: list[Pair] = []

    def make(*arguments: Any) -> Pair:
        pair = Pair(*arguments)
        if arguments[3] == READER:
            pairs.append(pair)
        return pair

    monkeypatch.setattr(collective, "Pair", make)
    return pairs


def publish(transport: Collective, trainer: Trainer, step: int) -> WeightVersion:
    trainer.train(step)
    version = transport.publish(step, trainer.parts)
    assert version is not None
    return version


def check(location: Mapping[str, Any], step: int, names: Sequence[str] = tuple(SHAPES)) -> None:
    found = dict(read(location, names))
    assert list(found) == list(names) and all(torch.equal(found[name], published(step)[name]) for name in names)


# ---------------------------------------------------------------- settings and backends


def test_settings(tmp_path: Path) -> None:
    wrong = [CollectiveConfig(versions=1), CollectiveConfig(attempts=0), CollectiveConfig(timeout_s=0.0), CollectiveConfig(piece_bytes=0)]
    for config in wrong:
        with pytest.raises(UsageError, match="weights"):
            Collective(config, tmp_path)
    with pytest.raises(UsageError, match=r"weights\.backend is 'mpi'; it must be one of auto, gloo, nccl"):
        Collective(CollectiveConfig(backend="mpi"), tmp_path)


@pytest.mark.parametrize(
    ("trainer", "reader", "message"),
    [
        (CUDA, {**CUDA, "unit": "b"}, ""),
        (CUDA, CUDA, "trainer and generator share one GPU (a)"),
        (CPU, CUDA, "the trainer has its tensors on the device 'cpu'"),
        (CUDA, CPU, "the generator has its tensors on the device 'cpu'"),
        (CUDA, {**CUDA, "unit": "b", "nccl": False}, "the generator's PyTorch was built without NCCL"),
    ],
)
def test_what_nccl_needs(trainer: Mapping[str, Any], reader: Mapping[str, Any], message: str) -> None:
    assert obstacle(trainer, reader) == message


def test_a_trainer_that_cannot_have_nccl(tmp_path: Path) -> None:
    transport = Collective(CollectiveConfig(backend="nccl"), tmp_path)
    with pytest.raises(
        UsageError, match=r"weights\.backend=nccl cannot be on trainer rank 0: the trainer has its tensors on the device 'cpu'"
    ):
        transport.publish(0, Trainer(SelfCommunicator()).parts)


def test_a_generator_that_cannot_have_nccl(transport: Collective, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's rank refuses it by name, and goes on."""
    location = publish(transport, Trainer(SelfCommunicator()), 0).location
    monkeypatch.setenv(collective.PROCESS, "generator-7")
    wanted, server = ["nccl"], transport._server
    monkeypatch.setattr(
        collective, "obstacle", lambda trainer, generator: "trainer and generator share one GPU (a)" if wanted == ["nccl"] else ""
    )
    object.__setattr__(server, "_config", CollectiveConfig(backend="nccl"))
    with pytest.raises(
        UsageError, match=r"trainer rank 0 cannot reach generator-7 \(process \d+ on .*\): trainer and generator share one GPU"
    ):
        check(location, 0)
    object.__setattr__(server, "_config", CollectiveConfig(backend="gloo", timeout_s=LONG_S))
    wanted.clear()
    check(location, 0)


# ---------------------------------------------------------------- groups


def test_groups_are_kept_from_version_to_version(transport: Collective, made: list[Pair]) -> None:
    trainer = Trainer(SelfCommunicator())
    for step in range(3):
        check(publish(transport, trainer, step).location, step)
    assert len(made) == 1 and made[0].backend == "gloo" and not dist.is_initialized()


def test_a_rank_that_has_nothing_to_send_is_in_no_group(tmp_path: Path, made: list[Pair]) -> None:
    """`scalar` and `nothing` are the first rank's alone; what is empty is sent by nobody."""

    def rank(world: Communicator) -> None:
        transport = Collective(CollectiveConfig(timeout_s=LONG_S), tmp_path)
        version = transport.publish(0, Trainer(world).parts)
        if version is not None:
            check(version.location, 0, ["nothing"])
            assert not made
            check(version.location, 0, ["scalar", "nothing"])
            assert len(made) == 1
            check(version.location, 0)
            assert len(made) == 3
        world.barrier("read")
        transport.close()

    run_ranks(3, rank)


def test_readers_have_groups_of_their_own(transport: Collective, made: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once; one leaves half-way."""
    monkeypatch.setattr(reading, "BATCH_BYTES", 1)
    location = publish(transport, Trainer(SelfCommunicator()), 0).location
    one = read(location, list(SHAPES))
    found = dict([next(one)])
    other = read(location, list(SHAPES))
    next(other)
    other.close()
    found |= dict(one)
    assert len(made) == 2 and all(torch.equal(found[name], published(0)[name]) for name in SHAPES)


def test_a_reader_that_does_not_come_holds_up_no_other(transport: Collective) -> None:
    """It asks for boxes and stays away from the group that they are to come by."""
    location = publish(transport, Trainer(SelfCommunicator()), 0).location
    with socket.create_connection(tuple(location["servers"][0]), LONG_S) as late:
        wire.give_proof(late, location["token"])
        wire.receive_json(late)
        wire.send_json(late, {"epoch": "late", "reader": own_name(), "device": CPU})
        assert wire.receive_json(late)["backend"] == "gloo"
        wire.send_json(late, {"version": 0, "boxes": [["matrix", [0, 0], [9, 7]]]})
        assert wire.receive_json(late) == {"bytes": 126}
        check(location, 0)


def breaking(monkeypatch: pytest.MonkeyPatch, breaks: Callable[[int], bool]) -> None:
    """The trainer's n-th piece fails where `breaks(n)`, and the group ends with it. Words of greeting are no pieces."""
    send, count = Pair.send, [0]

    def sent(pair: Pair, tensor: Tensor) -> None:
        if tensor.numel() > 1:
            count[0] += 1
            if breaks(count[0]):
                raise ConnectionError("the other process is gone")
        send(pair, tensor)

    monkeypatch.setattr(Pair, "send", sent)


@pytest.mark.parametrize("piece", [1, 2, 4])
def test_a_group_that_breaks_is_made_again(
    transport: Collective, made: list[Pair], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, piece: int
) -> None:
    location = publish(transport, Trainer(SelfCommunicator()), 0).location
    monkeypatch.setenv(collective.PROCESS, "generator-1")
    breaking(monkeypatch, lambda number: number == piece)
    check(location, 0)
    assert len(made) == 2
    (said,) = [record.getMessage() for record in caplog.records if "generator-1" in record.getMessage()]
    assert said.startswith("Version 0 of the weights did not get whole from trainer rank 0 to generator-1 (process ")
    assert "the other process is gone in matrix" in said if piece == 1 else " in " in said


def test_a_group_that_always_breaks_is_an_error_and_no_mix(transport: Collective, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator's model is not served until a version has arrived whole; the trainer has it still."""
    version = publish(transport, Trainer(SelfCommunicator()), 3)
    monkeypatch.setenv(collective.PROCESS, "generator-1")
    monkeypatch.setattr(reading, "BATCH_BYTES", 1)
    with monkeypatch.context() as patch:
        breaking(patch, lambda number: number > 2)
        model = Small().to_empty(device="cpu")
        with pytest.raises(
            DistributedError,
            match=r"Version 3 of the weights did not get to generator-1 \(process \d+ on .*\) from trainer rank 0 at 127\.0\.0\.1:\d+: .*, in stack \(2 attempts",
        ):
            fill(model, version, current())
    assert filled_version(model) is None
    fill(model, version, current())
    assert filled_version(model) == 3
    assert all(torch.equal(tensor, published(3)[name]) for name, tensor in own_tensors(model).items())
    fill(model, version, current())


def test_a_push_that_stops_leaves_the_version_before(transport: Collective, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer stops in the middle of publishing; generators that ask have the old version, whole, and no new one."""
    trainer = Trainer(SelfCommunicator())
    before = publish(transport, trainer, 0)
    trainer.train(1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def stop(sums: Tensor, *arguments: Any) -> Tensor:
            raise KeyboardInterrupt

        patch.setattr(transport._server, "offer", stop)
        transport.publish(1, trainer.parts)
    check(before.location, 0)
    with pytest.raises(DistributedError, match=r"version 1 is not kept \(any more\), only \[0\]"):
        check({**before.location, "version": 1}, 1)
    check(publish(transport, trainer, 1).location, 1)
    check(before.location, 0)


def test_fill_tells_the_reader_where_the_model_is(transport: Collective, monkeypatch: pytest.MonkeyPatch) -> None:
    version, told = publish(transport, Trainer(SelfCommunicator()), 0), []

    def reader(location: Any, names: Any, boxes: Any = None, device: Any = None) -> Iterator[tuple[str, Tensor]]:
        told.append(device)
        return read(location, names, boxes, device)

    monkeypatch.setattr(collective, "read", reader)
    fill(Small().to_empty(device="cpu"), version, current())
    assert told == [torch.device("cpu")]


# ---------------------------------------------------------------- the two sides of a group


def joined(work: Callable[[Pair, int], Any], timeout_s: float = LONG_S) -> list[Any]:
    """What `work(pair, rank)` gives on both sides."""
    store = store_at("127.0.0.1", 0, LONG_S)
    stores = [store, store_at("127.0.0.1", store.port, LONG_S)]
    ends, found = socket.socketpair(), [None, None]

    def side(rank: int) -> None:
        pair = Pair("gloo", stores[rank], "epoch", rank, "127.0.0.1", torch.device("cpu"), ends[rank], timeout_s)
        try:
            found[rank] = work(pair, rank)
        finally:
            pair.end()

    threads = [threading.Thread(target=side, args=(rank,)) for rank in (TRAINER, READER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()
    return found


def test_waits_are_bounded() -> None:
    silent = threading.Event()

    def side(pair: Pair, rank: int) -> str:
        if rank == TRAINER:
            silent.wait(LONG_S)
            return ""
        pair.timeout_s = 0.05
        try:
            pair.receive(torch.empty(3))
            pair.wait()
        except TimeoutError as error:
            return str(error)
        finally:
            silent.set()
        return "received"

    assert joined(side)[READER] == "nothing came or went for 0.05 s"


def test_who_comes_alone_is_told_so() -> None:
    store = store_at("127.0.0.1", 0, LONG_S)
    one, other = socket.socketpair()
    with one, other, pytest.raises(OSError, match="the other side has not come to the group"):
        Pair("gloo", store, "epoch", READER, "127.0.0.1", torch.device("cpu"), one, 0.5)


def test_who_waits_for_one_that_is_gone_is_told_so() -> None:
    store = store_at("127.0.0.1", 0, LONG_S)
    one, other = socket.socketpair()
    other.close()
    with one, pytest.raises(ConnectionError, match="the other process is gone"):
        Pair("gloo", store, "epoch", READER, "127.0.0.1", torch.device("cpu"), one, LONG_S)


def test_a_connection_that_is_over() -> None:
    one, other = socket.socketpair()
    one.settimeout(LONG_S)
    assert not is_over(one)
    other.sendall(b"more")
    assert not is_over(one) and one.recv(4) == b"more"
    other.close()
    assert is_over(one)
    one.close()
    assert is_over(one)


@st.composite
def sent(draw: st.DrawFn) -> list[tuple[torch.dtype, tuple[int, ...], Box]]:
    """Boxes of tensors."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        start = tuple(draw(st.integers(0, size)) for size in shape)
        size = tuple(draw(st.integers(0, whole - begin)) for whole, begin in zip(shape, start, strict=True))
        rows.append(
            (draw(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.bool])), shape, Box(start, size))
        )
    return rows


@given(st.lists(st.tuples(sent(), st.integers(1, 40)), min_size=1, max_size=60))
@example_settings(2)
def test_pieces_are_the_bytes(cases: list[tuple[list[tuple[torch.dtype, tuple[int, ...], Box]], int]]) -> None:
    """Whatever the boxes and the buffers' size; and what is said to have arrived has."""
    batches = []
    for number, (rows, limit) in enumerate(cases):
        generator = torch.Generator().manual_seed(number)
        parts = [(torch.rand(shape, generator=generator) * 200).to(dtype)[slices(box)] for dtype, shape, box in rows]
        batches.append((parts, limit))

    def side(pair: Pair, rank: int) -> list[Any]:
        found: list[Any] = []
        for parts, limit in batches:
            if rank == TRAINER:
                send_parts(pair, parts, [torch.empty(limit, dtype=torch.uint8) for _ in range(2)])
                found.append(pair.moved)
            else:
                data = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)
                receive_into(pair, data, limit)
                found.append((pair.moved, data))
        return found

    trainer, reader = joined(side)
    for (parts, _), moved, (there, data) in zip(batches, trainer, reader, strict=True):
        expected = torch.cat([torch.empty(0, dtype=torch.uint8)] + [part.contiguous().reshape(-1).view(torch.uint8) for part in parts])
        assert torch.equal(data, expected)
        assert moved == there == data.numel()


def test_the_tensor_that_was_on_its_way() -> None:
    parts = [("a", 4), ("nothing", 0), ("b", 2)]
    assert [tensor_at(count, parts) for count in (0, 3, 4, 5, 6)] == ["a", "a", "b", "b", "b"]
