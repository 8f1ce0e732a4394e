"""What is about masters and about being refused: split and offloaded masters are bit for bit those of float32 masters, an update inside backward is that after it,
gradients of gradients, and errors that say what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from _programs import Program, batch, build, cast, loss_of, sharder_of, train_step
from _spawn import alone_within, spawn
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.contracts import OptimizerGroup
from intarsia.errors import PluginError, UsageError
from intarsia.plugins import current

BLOCKS = [
    {"shapes": [[3, 7], [1], [5], [2, 3, 5]]},
    {"shapes": [[9, 2], [64]], "frozen": [1]},
    {"shapes": [[4, 4], [0, 3]]},
    {"shapes": [[6, 5]]},
]
CHAIN = {"dim": 6, "blocks": BLOCKS, "calls": [{"block": number} for number in range(4)]}


def adamw(sharded: Any, table: Any, world: Communicator, **fields: Any) -> Any:
    from intarsia_optimizers.config import AdamWConfig

    config = AdamWConfig(lr=0.05, **fields)
    trained = {name: parameter for name, parameter in sharded.parameters().items() if parameter.requires_grad}
    return current().target(current().entry_of(config))(config, [OptimizerGroup("default", trained)], table, world)


def trained(world: Communicator, setting: dict[str, Any], flow: dict[str, Any], **fields: Any) -> dict[str, list[float]]:
    """This rank's masters after four steps."""
    model, table, sharded, mesh = build(world, CHAIN, setting, sharder_of(setting))
    optimizer = adamw(sharded, table, world, **fields)
    for step in range(4):
        train_step(sharded, model, optimizer, mesh, flow, 3, step)
    return {name: master.float().reshape(-1).tolist() for name, master in sharded.masters().items()}


def same(world: Communicator) -> list[str]:
    """The names of settings whose masters differ from the first one's of their group."""
    half = {"compute": "bfloat16", "reduce": "float32", "placement": "flat 1"}
    two = {"micro_batches": 2}
    groups = {
        "split": [
            (half, two),
            ({**half, "master": "split"}, two),
            ({**half, "master": "split", "offload": "low"}, two),
            ({**half, "master": "split", "offload": "low", "reshard": "never", "prefetch": 0}, two),
            ({**half, "offload": "cpu"}, two),
        ],
        "early": [
            ({}, two),
            ({}, {**two, "update": "in_backward"}),
            ({}, {**two, "update": "step"}),
            ({"offload": "cpu"}, {**two, "update": "in_backward"}),
        ],
        "driven": [({}, two), ({}, {**two, "drive": "schedule"}), ({"prefetch": 0, "reshard": "after 2"}, {**two, "depths": [0, 2, 1]})],
    }
    wrong = []
    for name, each in groups.items():
        first = trained(world, *each[0])
        for setting, flow in each[1:]:
            if json.dumps(trained(world, setting, flow)) != json.dumps(first):
                wrong.append(f"{name}: {setting} {flow}")
    return wrong


def test_masters_are_the_same_bit_for_bit() -> None:
    assert spawn(same, 2) == [[], []]


def refused(world: Communicator) -> list[str]:
    """Messages of what is refused while training."""
    messages = []
    tokens, x, labels = data = batch(1, world.rank, 0, 6)
    # Gradients of gradients: right where parameters stay, refused where they do not.
    model, table, sharded, _ = build(world, CHAIN, {"reshard": "never"}, sharder_of({"reshard": "never"}))
    whole = Program(CHAIN)
    for name, parameter in whole.named_parameters():
        table.fill(name, table[name].layout.whole(tuple(parameter.shape)).local(0), parameter.detach())
    found = []
    for each in (model, whole):
        x = data[1].clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(each, (tokens, x, labels), ()), x, create_graph=True)
        slope.square().sum().backward()
        found.append(x.grad)
    sharded.finish_gradients()
    messages.append(str(torch.allclose(*found, rtol=1e-6, atol=1e-7)))
    everyone = torch.zeros_like(whole.norm.weight) + whole.norm.weight.grad
    world.all_reduce(everyone, "sum")
    mine = sharded.parameters()["norm.weight"].grad
    messages.append(str(bool(torch.allclose(mine, everyone.split(3)[world.rank], rtol=1e-5, atol=1e-7))))
    model, _, sharded, _ = build(world, CHAIN, {}, sharder_of({}))
    x = data[1].clone().requires_grad_()
    try:
        torch.autograd.grad(loss_of(model, (tokens, x, labels), ()), x, create_graph=True)
    except PluginError as error:
        messages.append(str(error))
    sharded.zero_gradients()
    # Updated twice in one backward pass of a step.
    model, table, sharded, _ = build(world, CHAIN, {}, sharder_of({}))
    optimizer = adamw(sharded, table, world)
    loss = loss_of(model, data, ())
    try:
        with sharded.update_in_backward(optimizer, 1.0):
            loss.backward(retain_graph=True)
            loss.backward()
    except PluginError as error:
        messages.append(str(error))
    sharded.zero_gradients()
    # Updated between forward and backward.
    model, table, sharded, _ = build(world, CHAIN, {}, sharder_of({}))
    loss = loss_of(model, data, ())
    sharded.update(adamw(sharded, table, world), 1.0)
    try:
        loss.backward()
    except PluginError as error:
        messages.append(str(error))
    # Another plan on one rank.
    try:
        build(world, CHAIN, {}, sharder_of({"placement": "row 1" if world.rank else "row"}))
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_refusals_in_training() -> None:
    for stays, sums, double, twice, between, plan in spawn(refused, 2):
        assert (stays, sums) == ("True", "True")
        assert "create_graph=True" in double and "reshard=never" in double
        assert "was updated in this backward pass" in twice and "set_last_micro_batch(False)" in twice
        assert "updated between this forward pass and its backward pass" in between
        assert plan.startswith("DistributedError") and "the bucket plan" in plan and "rank 0" in plan and "rank 1" in plan


def waits(world: Communicator) -> list[str]:
    """One rank of two comes no more: the other says in what it waits for whom."""
    (model, _, _, _), (other, _, _, _) = (build(world, CHAIN, {}, sharder_of({})) for _ in range(2))
    data = batch(1, world.rank, 0, 6)
    loss = loss_of(model, data, ())
    found = []
    with alone_within(world, 2.0) as alone:
        for call in (loss.backward, lambda: loss_of(other, data, ())) if alone else ():
            try:
                call()
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_collective_that_waits_names_bucket_phase_and_ranks() -> None:
    reduced, gathered = spawn(waits, 2)[0]
    for text, phase in ((reduced, "reduce blocks.3"), (gathered, "unshard root")):
        assert (
            text.startswith("DistributedError: Rank 0 of 2")
            and f"'{phase}'" in text
            and "within 2 s" in text
            and "rank 1 said nothing" in text
        )


def test_two_buckets_of_one_slot(caplog: pytest.LogCaptureFixture) -> None:
    """In forward the inner one gets memory of its own, with a warning; where a backward pass waits for both, an error says what to set."""
    from intarsia.comm import FakeCommunicator

    same_size = [{"shapes": [[8, 8]]}] * 4
    program = {"dim": 6, "blocks": same_size, "calls": [{"block": 0, "inner": 2}, {"block": 1}]}
    world = FakeCommunicator(0, 2)
    model, _, sharded, _ = build(world, program, {"prefetch": 0}, sharder_of({"prefetch": 0}))
    loss = loss_of(model, cast(batch(1, 0, 0, 6), model), ())
    assert "'blocks.0' and 'blocks.2'" in caplog.text.replace("'blocks.2' and 'blocks.0'", "'blocks.0' and 'blocks.2'")
    assert "memory of its own" in caplog.text
    loss.backward()
    sharded.finish_gradients()
    # Called alone before: what its backward reads lies in the shared buffer.
    program["calls"] = [{"block": 2}, {"block": 0, "inner": 2}]
    model, _, sharded, _ = build(world, program, {}, sharder_of({"prefetch": 0}))
    with pytest.raises(PluginError, match=r"reshard=never.*reshard='after 2'"):
        loss_of(model, cast(batch(1, 0, 0, 6), model), ()).backward()


@pytest.mark.parametrize(
    "setting, text",
    [
        ({"offload": "low"}, "sharder.master=split, or offload=none"),
        ({"master": "split"}, "precision.compute=bfloat16"),
        ({"master": "split", "compute": "bfloat16", "dtype": "bfloat16"}, "precision.master=float32"),
        ({"reshard": "nevr"}, "never"),
        ({"offload": "cpuu"}, "cpu"),
        ({"gradients": "shard"}, "sharded"),
        ({"master": "splt"}, "split"),
        ({"payload": "fp"}, "fp8"),
        ({"reduce_op": "avg"}, "average"),
        ({"reshard": "after 0"}, "at least 1"),
        ({"buckets": [{"name": "a", "match": ["blocks.0.p11"]}]}, "blocks.0.p1"),
    ],
)
def test_settings_that_are_refused(setting: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as error:
        build(SelfCommunicator(), CHAIN, setting, sharder_of(setting))
    assert text in str(error.value)


def test_words_for_schedules() -> None:
    _, _, sharded, _ = build(SelfCommunicator(), CHAIN, {}, sharder_of({}))
    with pytest.raises(UsageError, match="schedule"):
        sharded.drive("schedul")
    with pytest.raises(UsageError, match=r"blocks\.1"):
        sharded.unshard("block.1")
    with pytest.raises(UsageError, match="0 or more"):
        sharded.set_prefetch(-1)
