"""FlexShard over 1 to 4 gloo processes gives the numbers of one plain process: losses, norms, gradients and parameters by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from _sharded import Tiny, batches, make, placements, train
from _spawn import spawn
from intarsia.comm import Communicator, FakeCommunicator, SelfCommunicator
from intarsia.config import MeshConfig
from intarsia.contracts import Box, Init
from intarsia.errors import PluginError
from intarsia.layout import Layout
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterInfo, ParameterTable
from intarsia_eager.config import WholeConfig
from intarsia_eager.whole import build as build_whole
from intarsia_flexshard.config import FlexShardConfig
from intarsia_flexshard.runtime import build as build_flexshard

PLAIN: dict[str, Any] = {}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "tied": {"tied": True},
    "frozen": {"frozen": ["embedding", "blocks.1", "blocks.2.up.bias"]},
    "unused on one rank": {"side_on": [0], "micro_batches": 2},
    "accumulation": {"micro_batches": 3},
    "reduced in every micro-batch": {"micro_batches": 2, "reduce_always": True},
    "recomputed": {"recompute": True, "micro_batches": 2},
    "evaluated between": {"evaluate": True},
}


def sharder(option: dict[str, Any], placement: str) -> Any:
    if option.get("whole"):
        return build_whole(WholeConfig())
    chosen = placements()[placement]
    return build_flexshard(FlexShardConfig(placement=chosen, reshard=option.get("reshard", "always"), debug=option.get("debug", False)))


def cases(world_size: int) -> list[tuple[str, dict[str, Any], str]]:
    """(name of the option that it must equal, option, placement)."""
    plain = [("plain", PLAIN, placement) for placement in placements()]
    options = [(name, option, "row") for name, option in OPTIONS.items()]
    if world_size == 1:
        return plain + options
    if world_size == 2:
        kept = [(name, {**OPTIONS[name], "reshard": "never"}, "flat") for name in ("tied", "recomputed", "unused on one rank")]
        return [*options, *kept, ("frozen", {**OPTIONS["frozen"], "debug": True}, "owned")]
    if world_size == 3:
        return [*plain, ("frozen", OPTIONS["frozen"], "flat"), ("accumulation", OPTIONS["accumulation"], "block")]
    replicas = [("plain", {"replicate": 2}, placement) for placement in placements()]
    unused = {**OPTIONS["unused on one rank"], "replicate": 2}
    whole = {**OPTIONS["accumulation"], "replicate": 4, "whole": True}
    return [*replicas, ("plain", PLAIN, "flat"), ("unused on one rank", unused, "row"), ("accumulation", whole, "row")]


def run_cases(world: Communicator) -> list[Any]:
    return [train(world, option, sharder(option, placement)) for _, option, placement in cases(world.size)]


def reference(option: dict[str, Any]) -> dict[str, Any]:
    """The same training in this process, on the model's own parameters."""
    return train(SelfCommunicator(), option, build_whole(WholeConfig()))


def differences(got: Any, wanted: Any, path: str = "", tolerance: float = 2e-5) -> list[str]:
    if isinstance(wanted, dict):
        missing = sorted(wanted.keys() ^ got.keys())
        found = [f"{path}: only on one side: {missing}"] if missing else []
        return found + [line for key in wanted if key in got for line in differences(got[key], wanted[key], f"{path}/{key}", tolerance)]
    one, other = torch.tensor(got, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    if one.shape != other.shape or not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
        return [f"{path}: {one.flatten()[:4].tolist()} instead of {other.flatten()[:4].tolist()}"]
    return []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_n_processes_equal_one(ranks: int) -> None:
    references = {name: reference(option) for name, option in OPTIONS.items() if "side_on" not in option}
    results = spawn(run_cases, ranks) if ranks > 1 else [run_cases(SelfCommunicator())]
    for (name, option, placement), result in zip(cases(ranks), results[0], strict=True):
        label = f"{name} {option} {placement} over {ranks}"
        wanted = references.get(name) or plain_autograd(option, ranks)
        assert differences(result, wanted) == [], label
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert mine["losses"] == theirs["losses"] and mine["norms"] == theirs["norms"]


def plain_autograd(option: dict[str, Any], ranks: int) -> dict[str, Any]:
    """One process that runs every data rank's micro-batches in turn on one copy of the model: what the sum over ranks means."""
    model, _, sharded, _ = make(SelfCommunicator(), {**option, "replicate": 1}, build_whole(WholeConfig()))
    parameters = dict(sharded.parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.02, weight_decay=0.1)
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(3):
        total = 0.0
        for rank in range(ranks):
            mesh = Mesh(check_mesh(MeshConfig(), 1), SelfCommunicator())
            mesh.sizes["dp_shard"], mesh.coordinates["dp_shard"] = ranks, rank
            for tokens_BS, labels_BS in batches(step, mesh, option.get("micro_batches", 1)):
                logits = model.head(model(tokens_BS, rank in option["side_on"])).view(-1, model.head.out_features)
                loss = torch.nn.functional.cross_entropy(logits, labels_BS.reshape(-1), reduction="sum") / 48
                loss.backward()
                total += loss.item()
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters.values()])
        result["losses"].append(total)
        result["norms"].append([flat.norm(p).item() for p in (2.0, 3.0, math.inf)])
        if step == 2:
            result["gradients"] = {name: parameter.grad.tolist() for name, parameter in parameters.items()}
        optimizer.step()
        optimizer.zero_grad()
    result["parameters"] = {name: parameter.tolist() for name, parameter in parameters.items()}
    return result


def test_whole_is_plain_autograd() -> None:
    option = {"side_on": [0], "micro_batches": 2}
    assert differences(reference(option), plain_autograd(option, 1), tolerance=1e-7) == []


def half_precision(world: Communicator) -> list[Any]:
    options = [{"compute": "bfloat16"}, {"compute": "bfloat16", "micro_batches": 2}, {"compute": "bfloat16", "reduce": "bfloat16"}]
    return [train(world, option, sharder(option, "flat"), steps=2) for option in options]


def test_half_precision_compute_keeps_float32_masters() -> None:
    exact = reference(PLAIN)
    alone = half_precision(SelfCommunicator())
    assert all(abs(result["losses"][0] - exact["losses"][0]) < 0.02 for result in alone)
    assert alone[0]["losses"] != exact["losses"][:2]
    for result in spawn(half_precision, 2):
        for got, wanted in zip(result, alone, strict=True):
            assert differences(got["losses"], wanted["losses"], tolerance=4e-3) == []
            assert differences(got["norms"], wanted["norms"], tolerance=3e-2) == []


def refuses(world: Communicator) -> list[str]:
    """What goes wrong when ranks build different buckets, and when parameters change between forward and backward."""
    messages = []
    try:
        option = {"frozen": ["blocks.1"] if world.rank else []}
        make(world, option, sharder({}, "row"))
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")
    model, _, sharded, _ = make(world, {}, sharder({"debug": True}, "row"))
    loss = model(torch.zeros(2, 3, dtype=torch.long), True).sum()
    sharded.after_update()
    try:
        loss.backward()
    except PluginError as error:
        messages.append(str(error))
    messages.append(str(bool(model.blocks[0].up.weight.isnan().all())))
    return [*messages, *norms(world)]


def norms(world: Communicator) -> list[float]:
    """The examples of a norm over pipeline stages (3 and 4), of a pending sum, and of a NaN on one rank."""
    stages = ParameterTable()
    stages.mesh = Mesh(check_mesh(MeshConfig(pp=2), 2), world)
    for stage in range(2):
        layout = Layout.whole((2,))
        stages.add(ParameterInfo(f"stage.{stage}", (2,), "float32", Init("zeros"), layout=layout))
    mine = {f"stage.{world.rank}": torch.tensor([[3.0, 0.0], [0.0, -4.0]][world.rank])}
    found = [stages.norm(mine, world, p).item() for p in (2.0, math.inf)]
    stages.mesh = Mesh(check_mesh(MeshConfig(), 2), world)
    pending = {"stage.0": Layout.whole((2,)).partial("dp_shard", 2, "sum")}
    contribution = {"stage.0": torch.tensor([[1.0, 3.0], [2.0, 1.0]][world.rank])}
    found.append(stages.norm(contribution, world, layouts=pending).item())
    copies = {"stage.0": Layout.whole((2,), axes=[("dp_shard", 2)])}
    found.append(stages.norm({"stage.0": torch.tensor([3.0, 4.0])}, world, layouts=copies).item())
    broken = {"stage.0": torch.tensor([3.0, math.nan if world.rank else 4.0])}
    cut = {"stage.0": Layout.whole((4,)).cut("dp_shard", [(Box((0,), (2,)),), (Box((2,), (2,)),)])}
    return found + [float(math.isfinite(stages.norm(broken, world, p, cut).item())) for p in (2.0, math.inf)]


def test_misuse_is_told_and_norms_are_of_the_whole() -> None:
    for result in spawn(refuses, 2):
        assert "DistributedError" in result[0] and "the bucket plan" in result[0] and "rank 0: true; rank 1: false" in result[0]
        assert "updated between this forward pass and its backward pass" in result[1]
        assert result[2] == "True"
        assert result[3:7] == [5.0, 4.0, 5.0, 5.0]
        assert result[7:] == [0.0, 0.0]


def test_compiled_blocks_give_the_same_numbers() -> None:
    option = {"compile": "aot_eager", "micro_batches": 2, "evaluate": True}
    wanted = reference({"micro_batches": 2, "evaluate": True})
    for compute in ("float32", "bfloat16"):
        got = train(SelfCommunicator(), {**option, "compute": compute}, sharder({}, "row"))
        tolerance = 2e-5 if compute == "float32" else 0.05
        assert differences(got["losses"], wanted["losses"], tolerance=tolerance) == []


def test_communication_is_what_the_contract_says() -> None:
    """One rank of two, the other one missing. Three blocks take turns in two buffers: the last two of a pass are still there when the next one begins at
    their end, so that after the first micro-batch each pass gathers one block. One reduction in the step, as backward leaves."""
    world = FakeCommunicator(0, 2)
    model, _, sharded, mesh = make(world, {"twice": False}, sharder({"debug": False}, "flat"))
    before_finish = []
    for number, (tokens_BS, _) in enumerate(batches(0, mesh, 3)):
        sharded.set_last_micro_batch(number == 2)
        model(tokens_BS, True).sum().backward()
        before_finish.append(sharded.parameters()["blocks.2.up.weight"].grad is not None)
    sharded.finish_gradients()
    stats = {name: each for bucket in sharded.buckets for group in bucket.groups for name, each in group.stats().items()}
    calls = {name: each.calls for name, each in stats.items()}
    assert before_finish == [False, False, True]
    assert [calls[f"unshard blocks.{number}"] for number in range(3)] == [4, 1, 3] and calls["unshard root"] == 1
    assert [calls[f"reduce {name}"] for name in ("root", "blocks.0", "blocks.1", "blocks.2")] == [1] * 4
    elements = sum(parameter.numel() for parameter in model.blocks[2].parameters())
    assert 3 * 4 * elements / 2 <= stats["unshard blocks.2"].bytes <= 3 * 4 * (elements / 2 + 4 * 32)


def test_tiny_has_what_makes_sharding_hard() -> None:
    shapes = {tuple(parameter.shape) for parameter in Tiny().parameters()}
    assert {(1,), (7,), (5, 7), (9, 7)} <= shapes
