"""A model saved with any placement, masters, payload, offload and number of ranks is loaded with any other, bit for bit: values and both optimizers' state, through the parts that
a run's checkpoint is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from _sharded import make, whole_tensors
from _spawn import spawn
from intarsia.comm import SelfCommunicator
from intarsia.parameters import join_master, split_master

HALF: dict[str, Any] = {"compute": "bfloat16"}
SPLIT: dict[str, Any] = {**HALF, "master": "split"}
# What a run can be saved with and loaded with: the sharder's settings.
WAYS: dict[str, dict[str, Any]] = {
    "flat, split": {**SPLIT, "placement": "flat"},
    "owned": {"placement": "owned"},
    "row, fp8": {**HALF, "placement": "row", "payload": "fp8", "tile": (2, 2)},
    "flat, fp8, split": {**SPLIT, "placement": "flat", "payload": "fp8", "tile": (2, 2)},
    "block, in the host's memory": {"placement": "block", "offload": "cpu"},
    "column, low halves in the host's memory": {**SPLIT, "placement": "column", "offload": "low"},
    "replicate": {**HALF, "placement": "replicate", "reshard": "never"},
    "mixed": {"placement": "mixed"},
}
OPTIMIZERS = ("adamw", "muon")


def rotated(by: int) -> dict[str, str]:
    """Another way for each."""
    names = list(WAYS)
    return {name: names[(number + by) % len(names)] for number, name in enumerate(names)}


class Part:
    """The model, its optimizer, and the parts of a checkpoint, as one rank has them."""

    def __init__(self, world: Any, way: str, kind: str) -> None:
        from _sharded import placements
        from intarsia.plugins import current
        from intarsia.train.groups import optimizer_groups
        from intarsia.train.state import ModelState, OptimizerState
        from intarsia_flexshard.config import FlexShardConfig
        from intarsia_optimizers.config import AdamWConfig, MuonConfig

        settings = {**WAYS[way]}
        option = {"compute": settings.pop("compute", "float32"), "twice": False}
        config = FlexShardConfig(**{**settings, "placement": placements()[settings["placement"]]})
        self.world = world
        self.model, self.table, self.sharded, _ = make(world, option, current().build(config))
        groups = optimizer_groups((), self.sharded.parameters(), list(self.table))
        optimizer = AdamWConfig(lr=0.02) if kind == "adamw" else MuonConfig(lr=0.02, newton_schulz_dtype="float32")
        self.optimizer = current().build(optimizer, groups, self.table, world)
        self.stateful = [ModelState(self.model, self.sharded, self.table), OptimizerState(self.optimizer, self.table)]

    def train(self, steps: int) -> None:
        for step in range(steps):
            tokens = torch.randint(5, (2, 4), generator=torch.Generator().manual_seed(10 * step + self.world.rank))
            self.model(tokens, True).float().square().sum().backward()
            self.sharded.finish_gradients()
            self.sharded.update(self.optimizer, 1.0)
            self.sharded.zero_gradients()

    def whole(self) -> dict[str, Any]:
        """All values and all state, put together from the ranks."""
        found: dict[str, Any] = {"": whole_tensors(self.world, self.table, dict(self.sharded.masters()))}
        slots = self.optimizer.slots()
        for slot in sorted({slot for state in slots.values() for slot in state}):
            tensors = {name: state[slot] for name, state in slots.items() if slot in state}
            if next(iter(tensors.values())).ndim:
                found[slot] = whole_tensors(self.world, self.table, {name: tensor.float() for name, tensor in tensors.items()})
            else:
                found[slot] = {name: tensor.item() for name, tensor in tensors.items()}
        return found


def manager_of(world: Any, folder: str) -> Any:
    from intarsia_checkpoint_posix.storage import PosixStorage
    from intarsia_testing.stateful import OverStorage

    return OverStorage(PosixStorage(folder), world, {"mesh": {"dp_shard": world.size}})


def save(world: Any, root: str) -> None:
    """Train and save by every way and optimizer; what was saved is in whole.json beside."""
    for number, (way, kind) in enumerate((way, kind) for way in WAYS for kind in OPTIMIZERS):
        part = Part(world, way, kind)
        part.train(3)
        folder = Path(root, str(number))
        manager = manager_of(world, str(folder))
        manager.save(3, part.stateful)
        manager.wait()
        manager.close()
        whole = part.whole()
        if world.rank == 0:
            Path(root, f"{number}.json").write_text(json.dumps(whole))


def load(world: Any, root: str, ways: dict[str, str]) -> list[str]:
    """Load each save by another way, and go on training; what differs, in words."""
    wrong = []
    for number, (way, kind) in enumerate((way, kind) for way in WAYS for kind in OPTIMIZERS):
        part = Part(world, ways[way], kind)
        part.train(1)  # What was gathered before must not be read again.
        manager = manager_of(world, str(Path(root, str(number))))
        ref = manager.latest()
        manager.load(ref, part.stateful)
        manager.close()
        expected, found = json.loads(Path(root, f"{number}.json").read_text()), part.whole()
        if WAYS[ways[way]].get("master") == "split":
            expected[""] = {name: as_split(values) for name, values in expected[""].items()}
        for slot in expected.keys() | found.keys():
            wrong += [
                f"{way} -> {ways[way]}, {kind}: {slot or 'value'} of {name}"
                for name in expected[slot]
                if expected[slot][name] != found[slot][name]
            ]
        hidden = part.model(torch.arange(5).view(1, 5), True)
        if kind == "adamw" and not torch.isfinite(hidden).all():
            wrong.append(f"{way} -> {ways[way]}: the forward pass reads something else")
        head = part.model.head.weight.float()
        values = torch.tensor(expected[""]["head.weight"])
        if "fp8" not in ways[way] and not torch.equal(head, values.to(part.model.head.weight.dtype).float()):
            wrong.append(f"{way} -> {ways[way]}, {kind}: the head that was gathered")
    return wrong


def as_split(values: Any) -> Any:
    """What two halves hold of float32 values: themselves, but for exact ties."""
    whole = torch.tensor(values)
    high, low = torch.empty_like(whole, dtype=torch.bfloat16), torch.empty_like(whole, dtype=torch.int16)
    split_master(whole, high, low)
    return join_master(high, low).tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks have trained and saved."""
    root = tmp_path_factory.mktemp("saved")
    spawn(save, 2, str(root))
    return root


def test_three_ranks_load_what_two_saved_in_other_ways(saved: Path) -> None:
    assert spawn(load, 3, str(saved), rotated(1)) == [[]] * 3


def test_one_process_loads_what_two_saved(saved: Path) -> None:
    assert load(SelfCommunicator(), str(saved), rotated(3)) == []
    assert load(SelfCommunicator(), str(saved), dict.fromkeys(WAYS, "row, fp8")) == []


def test_state_is_there_to_be_compared(saved: Path) -> None:
    slots = [set(json.loads(path.read_text())) for path in sorted(saved.glob("*.json"))]
    assert {"", "exp_avg", "exp_avg_sq", "step"} in slots and {"", "exp_avg", "exp_avg_sq", "step", "momentum"} in slots
    values = json.loads((saved / "0.json").read_text())
    assert any(value for row in values["exp_avg"]["blocks.1.up.weight"] for value in row)
