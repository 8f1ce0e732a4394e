"""The kit's double keeps every promise of transports in worlds of processes; the kit says which promise is broken, for transports that break one each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from intarsia.comm import Communicator
from intarsia.errors import UsageError
from intarsia_testing import TransportConformance
from intarsia_testing.communicator import run_ranks
from intarsia_testing.transport_double import CopiedGather, SharedMemoryTransport
from intarsia_testing.transport_promises import examine
from torch import Tensor


class TestSharedMemory(TransportConformance):
    def make(self) -> SharedMemoryTransport:
        return SharedMemoryTransport()


class NeedsAnotherDevice(TransportConformance):
    """Not collected by its name: the test below asks what the kit says of it."""

    sizes = (2,)

    def make(self) -> Any:
        return Refusing()


class Refusing(SharedMemoryTransport):
    def check(self, comm: Communicator) -> None:
        if comm.size > 1:
            raise UsageError("it needs a quantum link")


def test_a_transport_that_refuses_the_world_is_told_so() -> None:
    kit = NeedsAnotherDevice()
    with pytest.raises(
        pytest.fail.Exception, match=r"promise `serves` is broken: check.. refuses a group of 2 on cpu: it needs a quantum link"
    ):
        kit.test_serves_its_group()
    with pytest.raises(pytest.fail.Exception, match=r"promise `gathers` is broken: with 2 processes it was not reached: .*quantum link"):
        kit.test_gathers_parts_in_rank_order()


# ---------------------------------------------------------------- broken ones, each rank a thread


class NoFence(SharedMemoryTransport):
    def fence(self, comm: Communicator) -> None:
        pass


class OnlyOneRankKnows(SharedMemoryTransport):
    def prepare_gather(self, comm: Communicator, local: Tensor, full: Tensor, counts: Sequence[int], what: str) -> Any:
        made = super().prepare_gather(comm, local, full, counts, what)
        return (
            None
            if comm.rank == 0
            else made or CopiedGather(comm, local, full, counts, what, list(full.clone().view(torch.uint8).split(48)))
        )


class NeverMine(SharedMemoryTransport):
    def prepare_gather(self, comm: Communicator, local: Tensor, full: Tensor, counts: Sequence[int], what: str) -> Any:
        return None


class Uncounted(SharedMemoryTransport):
    def prepare_gather(self, *arguments: Any) -> Any:
        made = super().prepare_gather(*arguments)
        if made is not None:
            made.bytes = 0
        return made


class Reversed(SharedMemoryTransport):
    def prepare_gather(self, *arguments: Any) -> Any:
        made = super().prepare_gather(*arguments)
        if isinstance(made, CopiedGather) and len({source.numel() for source in made._sources}) == 1:
            made._sources = made._sources[::-1]
        return made


class OneMemory(SharedMemoryTransport):
    """Gives the same memory twice."""

    def empty(self, comm: Communicator, numel: int, dtype: torch.dtype) -> Tensor:
        if not self._maps:
            super().empty(comm, 4096, torch.uint8)
        return self._maps[0][comm.rank][: numel * dtype.itemsize].view(dtype)


class Padded(SharedMemoryTransport):
    def empty(self, comm: Communicator, numel: int, dtype: torch.dtype) -> Tensor:
        return super().empty(comm, -(-numel // 8) * 8, dtype)


class OnlyMany(SharedMemoryTransport):
    def check(self, comm: Communicator) -> None:
        if comm.size == 1:
            raise UsageError("one is no number")


@pytest.mark.parametrize(
    ("transport", "promise", "words"),
    [
        (Refusing, "serves", "quantum link"),
        (OnlyMany, "serves_one", "one is no number"),
        (Padded, "gives_memory", "promise `gives memory`"),
        (OneMemory, "gives_memory", "promise `memory is its own`"),
        (NeverMine, "gathers", "gives None for even, torch.bfloat16"),
        (Uncounted, "gathers", "promise `counts true bytes`"),
        (Reversed, "gathers", "promise `gathers` is broken: even, torch.bfloat16: element 0 of 192"),
        (NoFence, "fence_orders_writes", "promise `fence orders writes` is broken: turn "),
        (NoFence, "fence_orders_reads", "promise `fence orders reads` is broken: rank "),
        (OnlyOneRankKnows, "agrees_on_other_memory", "on some ranks only"),
    ],
)
def test_broken_transports(transport: Callable[[], SharedMemoryTransport], promise: str, words: str) -> None:
    made = [transport() for _ in range(2)]

    def work(comm: Communicator) -> dict[str, str | None]:
        return dict(examine(made[comm.rank], comm, only=(promise,)))

    found = run_ranks(2, work)[0]
    assert list(found) == [promise] and words in (found[promise] or ""), found
