"""Real processes over a real disk: two save, three load."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from _spawn import spawn


def state(rank: int, world: int, filled: bool) -> Any:
    from intarsia.contracts import Box, StateItem
    from intarsia.layout import Layout
    from intarsia_testing.stateful import Holder, tensor_item

    whole = torch.arange(35.0).view(7, 5)
    rows = [7 * r // world for r in range(world + 1)]
    layout = Layout.whole((7, 5)).cut("dp_shard", [(Box((a, 0), (b - a, 5)),) if b > a else () for a, b in itertools.pairwise(rows)])
    local = whole[rows[rank] : rows[rank + 1]].clone() if filled else torch.zeros(rows[rank + 1] - rows[rank], 5)
    cursor = {f"source-{rank}": rank, "all": 4} if filled else {}
    return Holder(
        tensor_item("w", local, layout),
        StateItem("data", "cursor", "keyed", cursor),
        StateItem("rng", "torch", "rank", torch.full((3,), rank)),
        StateItem("progress", "steps", "replicated", 6 if filled else 0),
    )


def save(world: Any, folder: str) -> str:
    from intarsia_checkpoint_posix.storage import PosixStorage
    from intarsia_testing.stateful import OverStorage

    manager = OverStorage(PosixStorage(folder), world, {"mesh": {"dp_shard": world.size}})
    manager.save(6, [state(world.rank, world.size, True)])
    manager.wait()
    manager.close()
    return "saved"


def load(world: Any, folder: str) -> Any:
    from intarsia_checkpoint_posix.storage import PosixStorage
    from intarsia_testing.stateful import OverStorage

    manager = OverStorage(PosixStorage(folder), world, {"mesh": {"dp_shard": world.size}})
    ref = manager.latest()
    assert ref is not None and ref.verified
    own, want = state(world.rank, world.size, False), state(world.rank, world.size, True)
    step = manager.load(ref, [own])
    assert torch.equal(own.items[0].value, want.items[0].value)
    return [step, own.loaded["cursor"], own.loaded["steps"], own.missing_rank_state, own.loaded.get("torch", torch.zeros(0)).tolist()]


def test_two_save_three_load(tmp_path: Path) -> None:
    assert spawn(save, 2, str(tmp_path)) == ["saved"] * 2
    cursor = {"source-0": 0, "source-1": 1, "all": 4}
    assert spawn(load, 3, str(tmp_path)) == [[6, cursor, 6, True, []]] * 3
