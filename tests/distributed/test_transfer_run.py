"""Transfers carried out by real processes mean what the reference simulation says: every pair of layouts, all of them in one exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _spawn import spawn
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.errors import PluginError, UsageError
from intarsia.layout import Layout, Member
from intarsia_placements import flat, row
from intarsia_placements.config import Flat, Row
from intarsia_placements.layouts import build_layouts
from intarsia_testing.layout import simulate
from intarsia_transfer import Transfer, transfer
from intarsia_transfer.run import run_transfers

SHAPE = (5, 3)


def layouts(ranks: int) -> dict[str, Layout]:
    member = [Member("w", SHAPE)]
    whole = Layout.whole(SHAPE, axes=[("dp", ranks)])
    return {
        "rows": build_layouts(member, [("dp", ranks, row.build(Row()))])["w"],
        "flat": build_layouts(member, [("dp", ranks, flat.build(Flat(unit=1)))])["w"],
        "fewer": build_layouts(member, [("dp", 2, row.build(Row()))])["w"],
        "alone": Layout.whole(SHAPE),
        "replicas": whole,
        "sum": Layout.whole(SHAPE).partial("dp", ranks, "sum"),
        "max": Layout.whole(SHAPE).partial("dp", ranks, "max"),
    }


def locals_of(layout: Layout, seed: int) -> list[list[int]]:
    """Local values by rank: parts of one tensor, or each rank's own contribution where a reduction is pending. A sum of three fits into a byte."""
    full = torch.arange(15).mul(7).add(seed).remainder(70).view(SHAPE)
    parts = []
    for rank in range(layout.ranks):
        whole = full + rank * 3 * bool(layout.pending)
        boxes = [whole[tuple(map(slice, box.start, box.end))].reshape(-1) for box in layout.local(rank)]
        parts.append(torch.cat(boxes).tolist() if boxes else [])
    return parts


def plans(ranks: int) -> list[tuple[str, Transfer]]:
    named = layouts(ranks)
    pairs = [(a, b) for a in named for b in named if {a, b} != {"sum", "max"}]
    return [(f"{a} to {b}", transfer(named[a], named[b])) for a, b in pairs]


def everything(world: Communicator) -> dict[str, Any]:
    jobs, wanted = [], []
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
    for number, (name, plan) in enumerate(plans(world.size)):
        dtype = dtypes[number % len(dtypes)]
        sources, me = locals_of(plan.src, number), world.rank
        source = torch.tensor(sources[me] if me < plan.src.ranks else [], dtype=dtype)
        numel = plan.dst.numel(me) if me < plan.dst.ranks else 0
        destination = torch.full((numel,), 255, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
        jobs.append((plan, source, destination))
        wanted.append((name, simulate(plan, sources)[me] if me < plan.dst.ranks else []))
    for _ in range(2):
        run_transfers(world, jobs, "move all")
    wrong = [
        f"{name}: {destination.tolist()} instead of {want}"
        for (_, _, destination), (name, want) in zip(jobs, wanted, strict=True)
        if destination.tolist() != want
    ]
    statistic = world.stats()["move all"]
    received = sum(sum(plan.counts(world.rank)[1]) * source.element_size() for plan, source, _ in jobs if world.rank < plan.ranks)
    return {"wrong": wrong, "calls": statistic.calls, "bytes": statistic.bytes == 2 * received}


def test_three_processes_do_what_the_simulation_does() -> None:
    for result in spawn(everything, 3):
        assert result == {"wrong": [], "calls": 2, "bytes": True}


def test_one_process_has_nothing_to_exchange() -> None:
    plan = transfer(Layout.whole(SHAPE), Layout.whole(SHAPE).partial("dp", 1, "sum"))
    destination = torch.zeros(15, dtype=torch.float64)
    comm = SelfCommunicator()
    run_transfers(comm, [(plan, torch.arange(15.0), destination)], "move")
    assert destination.tolist() == list(range(15)) and comm.stats()["move"].bytes == 0
    run_transfers(comm, [], "nothing")


def test_what_does_not_fit_is_told() -> None:
    comm = SelfCommunicator(name="owners")
    wide = transfer(layouts(3)["rows"], layouts(3)["alone"])
    with pytest.raises(UsageError, match="between 3 ranks cannot be run in group 'owners' of 1"):
        run_transfers(comm, [(wide, torch.zeros(6), torch.zeros(15))])
    alone = transfer(layouts(1)["alone"], layouts(1)["alone"])
    with pytest.raises(PluginError, match=r"destination of a transfer .* has shape \(14,\); its layout says 15"):
        run_transfers(comm, [(alone, torch.zeros(15), torch.zeros(14))])
