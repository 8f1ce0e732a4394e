"""What ranks have sent may be added by the optimizer, in the pass that updates: the bits are those of adding it first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _sharded import batches, make, whole_tensors
from _spawn import spawn
from torch import nn

TILED: dict[str, Any] = {"payload": "fp8", "tile": (2, 2)}
# (settings, whether contributions arrive unsummed)
OPTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "flat": ({}, True),
    "row": ({"placement": "row"}, True),
    "owned, kept whole": ({"placement": "owned", "reshard": "never"}, True),
    "a frozen parameter, used twice": ({"frozen": ("blocks.0.up",)}, True),
    "float8": (TILED, True),
    "accumulated": ({"micro_batches": 3}, True),
    "a divisor that is a power of two": ({"reduce_op": "average"}, True),
    "another divisor": ({"reduce_op": "average", "divisor": 3.0}, False),
    "masters that are not split": ({"master": "float32"}, False),
    # But the root's: it is summed once.
    "sharded gradients": ({"micro_batches": 3, "gradients": "sharded"}, True),
    "replicas": ({"replicate": 2}, False),
    "offloaded": ({"offload": "cpu"}, False),
    "low halves on the host": ({"offload": "low"}, True),
    "low halves on the host, a last micro-batch that is accumulated": ({"offload": "low", "micro_batches": 3}, True),
    "low halves on the host, float8": ({"offload": "low", **TILED}, True),
    "low halves on the host, another divisor": ({"offload": "low", "reduce_op": "average", "divisor": 3.0}, False),
}


def double_kernels(seen: list[bool]) -> None:
    """Let the references stand in for kernels; `seen` says of each call whether it was given contributions."""
    from intarsia_optimizers import adamw, updates

    chosen = adamw.choose_kernel

    def choose(op: str, *rest: Any) -> Any:
        reference = {"adamw_update": updates.adamw_update, "adamw_quantised": updates.adamw_quantised}.get(op)

        def kernel(*arguments: Any) -> Any:
            seen.append(isinstance(arguments[4], tuple))
            return reference(*arguments)  # type: ignore[misc]

        kernel.takes_sums = True  # type: ignore[attr-defined]
        return chosen(op, *rest) if reference is None else kernel

    adamw.choose_kernel = choose


def run(world: Any, settings: dict[str, Any], early: bool) -> list[float]:
    """All losses, and all masters after three steps."""
    from _sharded import placements
    from intarsia.plugins import current
    from intarsia.train.groups import optimizer_groups
    from intarsia_flexshard.config import FlexShardConfig
    from intarsia_optimizers.config import AdamWConfig

    settings = {"placement": "flat", "master": "split", **settings}
    micro_batches = settings.pop("micro_batches", 1)
    option = {"compute": "bfloat16", "frozen": settings.pop("frozen", ()), "replicate": settings.pop("replicate", 1)}
    config = FlexShardConfig(**{**settings, "placement": placements()[settings["placement"]]})
    model, table, sharded, mesh = make(world, option, current().build(config))
    trained = {name: parameter for name, parameter in sharded.parameters().items() if parameter.requires_grad}
    optimizer = current().build(AdamWConfig(lr=0.02), optimizer_groups((), trained, list(trained)), table, world)
    found = []
    for step in range(3):
        for number, (tokens_BS, labels_BS) in enumerate(batches(step, mesh, micro_batches)):
            is_last = number == micro_batches - 1
            sharded.set_last_micro_batch(is_last)
            logits_NV = (model(tokens_BS, True) @ model.head.weight.t()).float().flatten(0, 1)
            loss = nn.functional.cross_entropy(logits_NV, labels_BS.reshape(-1), reduction="sum") / 48
            found.append(loss.item())
            if early and is_last:
                with sharded.update_in_backward(optimizer, 1.0):
                    loss.backward()
                    sharded.finish_gradients(wait=False)
            else:
                loss.backward()
        if not early:
            sharded.finish_gradients()
        sharded.update(optimizer, 1.0)
        sharded.zero_gradients()
    assert all(parameter.grad is None for parameter in trained.values())
    return (
        found
        + torch.cat([torch.tensor(values).flatten() for values in whole_tensors(world, table, dict(sharded.masters())).values()]).tolist()
    )


def compared(world: Any, name: str) -> list[bool]:
    """[equal bits, some contributions were unsummed as backward updated, and as `update` did]."""
    seen: list[bool] = []
    double_kernels(seen)
    late = run(world, OPTIONS[name][0], False)
    of_late = any(seen)
    seen.clear()
    return [run(world, OPTIONS[name][0], True) == late, any(seen), of_late]


def all_of(world: Any) -> dict[str, list[bool]]:
    return {name: compared(world, name) for name in OPTIONS}


def test_contributions_are_added_by_the_optimizer_bit_for_bit() -> None:
    for found in spawn(all_of, 2):
        assert found == {name: [True, unsummed, False] for name, (_, unsummed) in OPTIONS.items()}


def test_a_failing_update_leaves_nothing_handed_on() -> None:
    assert spawn(failing, 2) == [["no more", True]] * 2


def failing(world: Any) -> list[Any]:
    """What the caller sees, and whether the next step has the gradients of its own backward."""
    from _sharded import placements
    from intarsia.plugins import current
    from intarsia_flexshard.config import FlexShardConfig

    class Fails:
        takes_sums = updates_split_masters = True

        def step_quantising(self, factor: float, names: Any, wires: Any, sums: Any) -> list[Any]:
            raise ValueError("no more")

    found: list[Any] = []
    grads = []
    for fails in (True, False):
        model, _, sharded, mesh = make(
            world, {"compute": "bfloat16"}, current().build(FlexShardConfig(placement=placements()["flat"], master="split"))
        )
        tokens = next(iter(batches(0, mesh, 1)))[0]
        if fails:
            with pytest.raises(ValueError) as error, sharded.update_in_backward(Fails(), 1.0):
                model(tokens, True).float().square().sum().backward()
                sharded.finish_gradients()
            found.append(str(error.value))
            sharded.zero_gradients()
        model(tokens, True).float().square().sum().backward()
        sharded.finish_gradients()
        grads.append(torch.cat([p.grad.flatten() for p in sharded.parameters().values() if p.grad is not None]))
    return [*found, bool(torch.equal(*grads))]


def test_low_halves_come_back_when_they_are_needed() -> None:
    """A bucket's own as it is left, for an update that spares a sum; all once half of the buckets are left; nobody's before."""
    for found in spawn(places, 2):
        assert found["backward"] == ["gone", "gone", "gone"]
        assert found["blocks.2"] == ["gone", "gone", "coming"]
        assert found["blocks.1"][:2] == ["coming", "coming"]
        assert found["the end"] == ["leaving", "leaving", "leaving"]


def places(world: Any) -> dict[str, Any]:
    """Where the low halves of the three blocks are as backward begins, as each block's reduction starts, and after the step."""
    from _sharded import placements
    from intarsia.plugins import current
    from intarsia.train.groups import optimizer_groups
    from intarsia_flexshard.config import BucketConfig, FlexShardConfig
    from intarsia_optimizers.config import AdamWConfig

    double_kernels([])
    flat = placements()["flat"]
    apart = (BucketConfig(name="embedding", match=("embedding*", "head*", "norm*"), placement=flat, reshard="never", offload="none"),)
    config = FlexShardConfig(placement=flat, master="split", offload="low", buckets=apart)
    model, table, sharded, mesh = make(world, {"compute": "bfloat16", "twice": False}, current().build(config))
    parameters = dict(sharded.parameters())
    optimizer = current().build(AdamWConfig(), optimizer_groups((), parameters, list(parameters)), table, world)
    waiting = [bucket for bucket in sharded.buckets if bucket.halves is not None]
    found: dict[str, Any] = {}

    def note(what: str) -> None:
        found[what] = [bucket.halves.place for bucket in waiting]

    for bucket in waiting:

        def start(*arguments: Any, name: str = bucket.name, chosen: Any = bucket.reduction.start) -> None:
            note(name)
            chosen(*arguments)

        bucket.reduction.start = start
    for step in range(2):
        tokens_BS = next(iter(batches(step, mesh, 1)))[0]
        with sharded.update_in_backward(optimizer, 1.0):
            loss = (model(tokens_BS, True) @ model.head.weight.t()).float().square().sum()
            note("backward")
            loss.backward()
            sharded.finish_gradients(wait=False)
        sharded.update(optimizer, 1.0)
        sharded.zero_gradients()
    note("the end")
    return found
