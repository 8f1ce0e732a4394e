"""An update that also quantises: the wire, masters and state are those of an update and of quantising behind it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia.comm import SelfCommunicator
from intarsia.contracts import OptimizerGroup
from intarsia_flexshard import reduction
from intarsia_flexshard.payload import PlainPayload, step_quantising
from intarsia_flexshard.quantised import WireViews
from intarsia_flexshard.tiles import quantise_tiles
from intarsia_optimizers import adamw, updates
from intarsia_optimizers.config import AdamConfig, AdamWConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from _shards import SHAPES, Shards

TILE = (4, 4)
CALLS: list[Any] = []


def adamw_quantised(*arguments: Any) -> bool:
    """The reference in a kernel's place."""
    CALLS.append(arguments[11])
    return updates.adamw_quantised(*arguments)


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = adamw.choose_kernel
    CALLS.clear()
    monkeypatch.setattr(adamw, "choose_kernel", lambda op, *rest: adamw_quantised if op == "adamw_quantised" else chosen(op, *rest))


def wire_of(shards: Shards) -> WireViews:
    """A wire for all matrices of the shards, which are in one storage."""
    base = next(iter(shards.parameters.values())).detach()
    values = base.new_empty(0).set_(base.untyped_storage())  # type: ignore[call-overload]
    boxes, payload, scale = [], 0, sum(parameter.numel() for parameter in shards.parameters.values()) // 4 + 1
    for name, parameter in shards.parameters.items():
        if len(SHAPES[name]) == 2:
            rows, columns = SHAPES[name]
            boxes.append((int(parameter.storage_offset()), payload, scale, rows, columns))
            payload, scale = payload + rows * columns, scale + -(-rows // TILE[0]) * -(-columns // TILE[1])
    return WireViews(values, torch.zeros(4 * scale, dtype=torch.uint8), tuple(boxes), TILE, False, torch.bfloat16)


class Payload(PlainPayload):
    def __init__(self, views: WireViews) -> None:
        self.views = views

    def wire_views(self) -> Any:
        return self.views


def built(config: Any, shards: Shards) -> Any:
    return adamw.build(config, [OptimizerGroup("default", shards.parameters)], shards.table, SelfCommunicator())


@pytest.mark.parametrize("split", (False, True))
def test_masters_state_and_wire_are_those_of_quantising_afterwards(split: bool) -> None:
    config, shards, reference = AdamWConfig(lr=0.01, decay_vectors=True), Shards(split=split), Shards(split=split)
    one, other = built(config, shards), built(config, reference)
    wires = wire_of(shards), wire_of(reference)
    payload = Payload(wires[0])
    for step in range(3):
        shards.differentiate(step)
        reference.differentiate(step)
        assert step_quantising(one, 1.0, tuple(shards.parameters), [payload]) == [payload]
        other.step(1.0)
    quantise_tiles(*wires[1])
    assert len(CALLS) == 3 and CALLS[0] == CALLS[2] and len(CALLS[0]) == len(wires[0].boxes)
    for name, value in reference.masters().items():
        torch.testing.assert_close(shards.masters()[name], value, rtol=1e-6, atol=1e-7)
    for name, slots in other.slots().items():
        for slot, state in slots.items():
            torch.testing.assert_close(one.slots()[name][slot], state, rtol=1e-6, atol=1e-7)
    quantise_tiles(wires[0].values, wires[1].wire, *wires[0][2:])
    assert torch.equal(wires[0].wire, wires[1].wire)


def test_a_wire_is_not_written_unless_all_of_it_is() -> None:
    """Matrices without a gradient, other rules and other optimizers leave quantising to the sharder."""
    shards = Shards(split=True)
    payload, optimizer = Payload(wire_of(shards)), built(AdamWConfig(decay_vectors=True), shards)
    matrix = next(name for name, shape in SHAPES.items() if len(shape) == 2)
    shards.differentiate(0)
    shards.parameters[matrix].grad = None
    assert step_quantising(optimizer, 1.0, tuple(shards.parameters), [payload]) == []
    shards.differentiate(1)
    assert step_quantising(built(AdamConfig(l2=0.1), shards), 1.0, tuple(shards.parameters), [payload]) == []

    class Plain:
        steps = 0

        def step(self, factor: float, names: Any) -> None:
            self.steps += 1

    plain: Any = Plain()
    assert step_quantising(plain, 1.0, ("a",), [payload]) == [] and plain.steps == 1


@pytest.mark.parametrize("can", (False, True))
def test_kernels_are_given_contributions_only_if_they_say_so(can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that does not, neither the update nor the sharder hears of them."""
    seen: set[tuple[str, bool]] = set()

    def kernel(*arguments: Any) -> None:
        seen.add(("update", isinstance(arguments[4], tuple)))
        updates.adamw_update(*arguments)

    def quantised(*arguments: Any) -> bool:
        seen.add(("quantised", isinstance(arguments[4], tuple)))
        return updates.adamw_quantised(*arguments)

    kernel.takes_sums = can  # type: ignore[attr-defined]
    monkeypatch.setattr(adamw, "choose_kernel", lambda op, *rest: {"adamw_update": kernel, "adamw_quantised": quantised}[op])
    one, other = Shards(split=True), Shards(split=True)
    optimizers = [built(AdamWConfig(decay_vectors=True), shards) for shards in (one, other)]
    assert optimizers[0].takes_sums == can
    assert not built(AdamConfig(l2=0.1), one).takes_sums
    if not can:
        return
    for shards in (one, other):
        shards.differentiate(0)
    size = next(iter(one.parameters.values())).untyped_storage().nbytes() // 2
    mine, theirs = torch.zeros(size, dtype=torch.bfloat16), torch.ones(size, dtype=torch.bfloat16)
    begins = {parameter: int(parameter.storage_offset()) for parameter in one.parameters.values()}
    for parameter, begin in begins.items():
        assert parameter.grad is not None
        mine[begin : begin + parameter.numel()] = parameter.grad.flatten()
        parameter.grad = None
    for parameter in other.parameters.values():
        assert parameter.grad is not None
        parameter.grad = (parameter.grad.bfloat16().float() + 1.0) * 0.5
    sums = reduction.Sums((mine, theirs), 0.5, begins)
    for wires, quantises in (([], False), ([wire_of(one)], True)):
        seen.clear()
        optimizers[0].step_quantising(1.0, tuple(one.parameters), wires, sums)
        # The one that quantises has not said that it takes them.
        assert seen == {("update", True), *([("quantised", False)] if quantises else [])}
        optimizers[1].step_quantising(1.0, tuple(other.parameters), [wire_of(other)] if quantises else [])
    for name, value in other.masters().items():
        assert torch.equal(one.masters()[name], value), name
