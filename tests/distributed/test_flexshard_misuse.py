"""What users do to a sharded model beside training it: it is told, or numbers stay right. And what failed half-way is not taken for whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _programs import Program, batch, build, cast, loss_of, sharder_of
from _spawn import spawn
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.contracts import Box, OptimizerGroup
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_flexshard.plan import make_geometry

BLOCKS: list[dict[str, Any]] = [{"shapes": [[6, 4], [5]]}, {"shapes": [[6, 4], [5]], "frozen": [1]}, {"shapes": [[6, 4], [5]]}]
CHAIN = {"dim": 6, "blocks": BLOCKS, "calls": [{"block": number} for number in range(3)]}


def made(world: Communicator, setting: dict[str, Any]) -> tuple[Program, Any, Any]:
    """Model, sharded model and AdamW."""
    from intarsia_optimizers.config import AdamWConfig

    model, table, sharded, _ = build(world, CHAIN, setting, sharder_of(setting))
    trained = {name: parameter for name, parameter in sharded.parameters().items() if parameter.requires_grad}
    return model, sharded, current().build(AdamWConfig(lr=0.05), [OptimizerGroup("default", trained)], table, world)


def loss(model: Program, world: Communicator, step: int = 0) -> torch.Tensor:
    return loss_of(model, cast(batch(1, world.rank, step, 6), model), ())


def values(sharded: Any) -> list[float]:
    return [value for master in sharded.masters().values() for value in master.float().flatten().tolist()]


# ---------------------------------------------------------------- gradients that somebody else drops


@pytest.mark.parametrize("setting", [{}, {"gradients": "sharded"}, {"compute": "bfloat16", "reduce": "float32"}])
def test_gradients_may_be_dropped_in_any_way(setting: dict[str, Any]) -> None:
    world, found = SelfCommunicator(), []
    for drop in ("sharded", "none", "zero", "model"):
        model, sharded, _ = made(world, setting)
        optimizer = torch.optim.SGD([p for p in sharded.parameters().values() if p.requires_grad], lr=0.1)
        for step in range(3):
            loss(model, world, step).backward()
            sharded.finish_gradients()
            optimizer.step()
            ways = {"sharded": sharded.zero_gradients, "model": model.zero_grad}
            ways.get(drop, lambda how=drop, optimizer=optimizer: optimizer.zero_grad(how == "none"))()
            sharded.after_update()
        found.append(values(sharded))
    assert found[1:] == found[:1] * 3


def test_a_gradient_that_was_replaced_is_added_to() -> None:
    world = SelfCommunicator()
    model, sharded, _ = made(world, {})
    parameters, sums = sharded.parameters(), []
    for _ in range(2):
        loss(model, world).backward()
        sharded.finish_gradients()
        sums.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        parameters["norm.weight"].grad, parameters["norm.bias"].grad = None, 3 * parameters["norm.bias"].grad
    assert torch.equal(sums[1]["norm.weight"], sums[0]["norm.weight"])
    assert torch.allclose(sums[1]["norm.bias"], 4 * sums[0]["norm.bias"]) and torch.allclose(
        sums[1]["head.weight"], 2 * sums[0]["head.weight"]
    )


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize(
    "act, text",
    [
        (copy.deepcopy, "cannot be copied"),
        (lambda model: model.state_dict(), "sharded.masters()"),
        (lambda model: model.blocks[0].state_dict(), "sharded.masters()"),
        (lambda model: model.load_state_dict(Program(CHAIN).state_dict()), "load_masters"),
        (lambda model: model.bfloat16(), "Do not call `to`"),
        (lambda model: model.blocks[2].double(), "bucket 'blocks.2'"),
        (lambda model: setattr(model.blocks[1].p0, "data", torch.ones(6, 4)), "'blocks.1.p0' was given other memory"),
        (lambda model: model.blocks[1].p1.requires_grad_(True), "'blocks.1.p1': requires_grad is True and was False"),
        (lambda model: model.head.weight.requires_grad_(False), "'head.weight': requires_grad is False and was True"),
    ],
)
def test_what_would_be_nonsense_is_told(act: Callable[[Program], Any], text: str) -> None:
    world = SelfCommunicator()
    model, sharded, _ = made(world, {"compute": "float32"})
    with pytest.raises(UsageError) as error:
        act(model)
        loss(model, world).backward()
        sharded.finish_gradients()
    assert text in str(error.value)


def test_frozen_for_a_pass_is_no_change() -> None:
    world = SelfCommunicator()
    model, sharded, _ = made(world, {})
    model.blocks[0].p0.requires_grad_(False)
    loss(model, world).backward()
    model.blocks[0].p0.requires_grad_(True)
    sharded.finish_gradients()
    assert not sharded.parameters()["blocks.0.p0"].grad.any() and sharded.parameters()["blocks.1.p0"].grad.any()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_not_lost_silently(register: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Program.__init__

    def hooked(self: Program, program: Any) -> None:
        begin(self, program)
        getattr(self.head.weight, register)(lambda gradient: None)

    monkeypatch.setattr(Program, "__init__", hooked)
    with pytest.raises(UsageError, match=r"'head\.weight' has hooks of its own"):
        made(SelfCommunicator(), {})


def test_masters_are_loaded_from_copies_too() -> None:
    world = SelfCommunicator()
    model, sharded, optimizer = made(world, {})
    before, kept = values(sharded), {name: value.clone() for name, value in sharded.masters().items()}
    loss(model, world).backward()
    sharded.finish_gradients()
    sharded.update(optimizer, 1.0)
    assert values(sharded) != before
    sharded.load_masters(kept)
    assert values(sharded) == before
    with pytest.raises(UsageError, match="no parameter 'nobody'"):
        sharded.load_masters({"nobody": torch.ones(2)})
    with pytest.raises(UsageError, match=r"'head\.weight' has shape"):
        sharded.load_masters({"head.weight": torch.ones(2)})
    assert values(sharded) == before


def test_ranks_compare_the_boxes_themselves() -> None:
    left, right = (Box((0, 0), (4, 2)),), (Box((0, 2), (4, 2)),)
    one, other = (make_geometry([(4, 4)], [[first], [second]], 1) for first, second in ((left, right), (right, left)))
    assert one.facts()[:-1] == other.facts()[:-1] and one.facts() != other.facts()


# ---------------------------------------------------------------- what fails half-way


class Failing:
    """An optimizer that fails in its call number `at`, before or after the update."""

    def __init__(self, optimizer: Any, at: int, late: bool) -> None:
        self._optimizer, self._left, self._late = optimizer, at, late

    def step(self, factor: Any, names: Any = None) -> None:
        self._left -= 1
        if self._left >= 0 or self._late:
            self._optimizer.step(factor, names)
        if self._left < 0:
            raise ArithmeticError("on purpose")


def stale(model: Program, sharded: Any, world: Communicator) -> float:
    """How far what a forward pass reads now is from the masters."""
    with torch.no_grad():
        now = loss(model, world, 5).item()
        sharded.after_update()
        return now - loss(model, world, 5).item()


def half_way(world: Communicator) -> list[str]:
    wrong = []

    def check(label: str, model: Program, sharded: Any, optimizer: Any) -> None:
        sharded.zero_gradients()
        if (gap := stale(model, sharded, world)) != 0.0:
            wrong.append(f"{label}: stale by {gap}")
        for _ in range(2):
            with sharded.update_in_backward(optimizer, 1.0):
                loss(model, world, 2).backward()
            sharded.finish_gradients()
            sharded.update(optimizer, 1.0)
            sharded.zero_gradients()
        if not all(map(math.isfinite, values(sharded))):
            wrong.append(f"{label}: not finite")

    fp8 = {"compute": "bfloat16", "payload": "fp8", "tile": (3, 2)}
    for setting in ({}, {"compute": "bfloat16"}, fp8):
        for at in range(2):
            for late in (False, True):
                model, sharded, optimizer = made(world, setting)
                loss(model, world).backward()
                sharded.finish_gradients()
                try:
                    sharded.update(Failing(optimizer, at, late), 1.0)
                    wrong.append("no failure")
                except ArithmeticError:
                    check(f"update {setting} {at} {late}", model, sharded, optimizer)
    for name in ("embedding.weight", "blocks.0.p0", "blocks.1.p0", "blocks.2.p0"):
        model, sharded, optimizer = made(world, {})
        hook = model.get_parameter(name).register_hook(lambda gradient: 1 // 0)
        try:
            with sharded.update_in_backward(optimizer, 1.0):
                loss(model, world).backward()
            wrong.append("no failure")
        except ZeroDivisionError:
            hook.remove()
            check(f"backward at {name}", model, sharded, optimizer)
    return [*wrong, *lost_gather(world)]


def lost_gather(world: Communicator) -> list[str]:
    """A gather fails once, as it begins: the next forward pass does not take what is in its memory for parameters."""
    model, sharded, _ = made(world, {"debug": True})
    wanted = loss(model, world).item()
    sharded.zero_gradients()
    sharded.after_update()
    bucket = next(bucket for bucket in sharded.buckets if bucket.name == "blocks.1")
    gather, failures = bucket.gather, [RuntimeError("on purpose")]

    class Once:
        def start(self) -> None:
            if failures:
                raise failures.pop()
            gather.start()

        def wait(self) -> None:
            gather.wait()

    bucket.gather = Once()
    try:
        loss(model, world)
        return ["no failure"]
    except RuntimeError:
        got = loss(model, world).item()
    return [] if got == wanted else [f"after a lost gather {got}, not {wanted}"]


def test_what_failed_half_way_is_not_taken_for_whole() -> None:
    assert spawn(half_way, 2) == [[], []]
