"""FlexShard whose gathers go through a transport gives the bits of FlexShard over the process group, also when ranks are late at random places."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _sharded import VOCAB, make, placements, train
from _spawn import spawn
from intarsia import plugins
from intarsia.comm import Communicator
from intarsia_comms.config import CopyEngineConfig
from intarsia_comms.copy_engine import CopyEngine, PulledGather
from intarsia_flexshard.config import FlexShardConfig
from intarsia_flexshard.runtime import FlexShard
from intarsia_testing.transport_double import mapped
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"micro_batches": 3},
    "frozen": {"frozen": ["embedding", "blocks.1", "blocks.2.up.bias"]},
    "evaluated between": {"evaluate": True},
}


class FileBlock:
    """A file of each rank that the others map, and barriers of the group, to which ranks come late at random."""

    def __init__(self, comm: Communicator, size: int, late: random.Random) -> None:
        folder = Path(comm.broadcast_json(tempfile.mkdtemp(prefix="block-") if comm.rank == 0 else None, what="folder"))
        own = mapped(folder / str(comm.rank), size)
        comm.barrier("written")
        self.views: Sequence[Tensor] = [own if rank == comm.rank else mapped(folder / str(rank), size) for rank in range(comm.size)]
        comm.barrier("mapped")
        if comm.rank == 0:
            shutil.rmtree(folder)
        self.comm, self.late = comm, late

    def barrier(self, channel: int) -> None:
        self.comm.barrier("block")
        time.sleep(self.late.choice((0.0, 0.0, 0.02)))


class FileMemory:
    """Blocks for processes on CPUs."""

    def __init__(self, rank: int) -> None:
        self.late = random.Random(rank)

    def fault(self, comm: Communicator) -> None:
        return None

    def facts(self, comm: Communicator) -> dict[str, Any]:
        return {}

    def unreachable(self, facts: Sequence[dict[str, Any]], rank: int) -> None:
        return None

    def usable(self, size: int) -> int:
        return self.footprint(size)

    def footprint(self, size: int) -> int:
        return -(-size // 4096) * 4096

    def block(self, comm: Communicator, size: int) -> FileBlock:
        return FileBlock(comm, size, self.late)


class WithFiles:
    """The installed plugins, but for the transport."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def build(self, config: Any) -> Any:
        return CopyEngine(FileMemory(self.rank)) if isinstance(config, CopyEngineConfig) else plugins.current().build(config)


def gathered_by_it(world: Communicator) -> list[bool]:
    """Of each bucket, whether its gather is the transport's."""
    config = FlexShardConfig(transport=CopyEngineConfig())
    model, _, sharded, _ = make(world, {}, FlexShard(config, WithFiles(world.rank)))
    with torch.no_grad():
        model(torch.arange(VOCAB).view(1, -1), True)
    return [isinstance(bucket.gather, PulledGather) for bucket in sharded.buckets]


def both(world: Communicator, cases: list[tuple[str, str]]) -> list[str]:
    """The cases (option, placement) in which a transport changes something."""
    late, wrong = random.Random(world.rank), []
    # Without a fence, ranks that have updated would gather from those that have not.
    register_optimizer_step_pre_hook(lambda *_: time.sleep(late.choice((0.0, 0.05))))
    for option, placement in cases:
        results = []
        for transport in (None, CopyEngineConfig()):
            config = FlexShardConfig(placement=placements()[placement], transport=transport)
            results.append(train(world, OPTIONS[option], FlexShard(config, WithFiles(world.rank))))
        wrong += [f"{option} {placement}"] if results[0] != results[1] else []
    return wrong if all(gathered_by_it(world)) else [*wrong, "a bucket goes through the process group"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_transport_changes_no_bit(ranks: int) -> None:
    options = OPTIONS if ranks == 2 else ("plain",)
    cases = [*((option, "row") for option in options), ("plain", "flat"), ("plain", "owned")]
    assert spawn(both, ranks, cases) == [[]] * ranks
