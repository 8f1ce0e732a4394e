"""Conformance of optimizers. Subclass, name your entry, run pytest; a failure says which promise is broken, in words.

    class TestMine(OptimizerConformance):
        entry = "my-distribution:mine"

The promises are those of `intarsia.contracts.Optimizer`, plus the two fields that every optimizer's config has: `lr` and a decoupled
`weight_decay`. The parameters are an embedding, matrices, a vector and one without elements; the loss is a fixed quadratic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import chz
import torch
from intarsia.comm import SelfCommunicator
from intarsia.config import OptimizerConfig
from intarsia.contracts import Init, Optimizer, OptimizerGroup
from intarsia.errors import UsageError
from intarsia.layout import Layout
from intarsia.parameters import ParameterInfo, ParameterTable
from intarsia.plugins import current
from torch import Tensor, nn

from intarsia_testing.base import Conformance
from intarsia_testing.promise import broken

SHAPES = {
    "embedding.weight": (11, 6),
    "layers.0.wide.weight": (4, 6),
    "layers.0.tall.weight": (6, 4),
    "layers.1.wide.weight": (4, 6),
    "layers.0.norm.weight": (6,),
    "layers.0.empty.bias": (0,),
}


def random_tensor(name: str, salt: int) -> Tensor:
    """A tensor that is a function of the parameter's name and a number."""
    seed = int.from_bytes(name.encode(), "little") % 2**31 + salt
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


class Bench:
    """Fresh parameters of SHAPES under one optimizer, and a quadratic whose gradients are functions of the parameters."""

    def __init__(
        self,
        config: OptimizerConfig,
        names: Sequence[str] = tuple(SHAPES),
        groups: Sequence[tuple[str, Sequence[str], Mapping[str, Any]]] = (),
    ):
        self.parameters = {name: nn.Parameter(random_tensor(name, 0)) for name in names}
        table = ParameterTable()
        for name, shape in SHAPES.items():
            table.add(ParameterInfo(name, shape, "float32", Init("normal", std=1.0), layout=Layout.whole(shape, "float32")))
        made = [OptimizerGroup(name, {member: self.parameters[member] for member in members}, options) for name, members, options in groups]
        made = made or [OptimizerGroup("default", dict(self.parameters))]
        plugins = current()
        self.optimizer: Optimizer = plugins.target(plugins.entry_of(config))(config, made, table, SelfCommunicator())

    def loss(self) -> float:
        """Half the squared distance to the goals."""
        return sum(float(((parameter.detach() - random_tensor(name, 1)) ** 2).sum()) / 2 for name, parameter in self.parameters.items())

    def step(
        self,
        factor: float | Tensor = 1.0,
        without: Sequence[str] = (),
        zero: bool = False,
        parts: Sequence[Collection[str] | None] = (None,),
    ) -> None:
        """One update by the quadratic's gradient; parameters in `without` have none. `parts` are the names of each call (None: all)."""
        for name, parameter in self.parameters.items():
            gradient = (parameter - random_tensor(name, 1)).detach() * (0.0 if zero else 1.0)
            parameter.grad = None if name in without else gradient
        for names in parts:
            # An optimizer of before `names` is asked for everything without it.
            self.optimizer.step(factor) if names is None else self.optimizer.step(factor, names)

    def values(self) -> dict[str, Tensor]:
        """Copies of the parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def take(self, other: Bench) -> None:
        """Continue where `other` is: parameters and slots copied by name, as a checkpoint does it."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(other.parameters[name])
                for slot, tensor in self.optimizer.slots()[name].items():
                    tensor.copy_(other.optimizer.slots()[name][slot])


class OptimizerConformance(Conformance):
    """Every promise of `intarsia.contracts.Optimizer`, one test each. Set `entry`, and `config` where the default settings should not be used."""

    kind: ClassVar[str] = "optimizer"

    def made(self, **fields: Any) -> OptimizerConfig:
        """The settings under test with `fields` replaced."""
        config = self.given_configs()[0]
        assert isinstance(config, OptimizerConfig)
        return chz.replace(config, **fields)

    def quiet(self, **fields: Any) -> OptimizerConfig:
        """The settings with every weight decay that they have at 0."""
        return self.made(**self._zero_decays(), **fields)

    def test_minimises(self) -> None:
        """The loss falls on a quadratic."""
        bench = Bench(self.quiet())
        before = bench.loss()
        for _ in range(50):
            bench.step()
        after = bench.loss()
        if not (math.isfinite(after) and after < before):
            broken("minimises", f"after 50 steps on a quadratic the loss went from {before:g} to {after:g}.")

    def test_deterministic(self) -> None:
        """Equal inputs give equal bits."""
        first, second = Bench(self.made()), Bench(self.made())
        for bench in (first, second):
            for _ in range(4):
                bench.step()
        self._expect_equal("deterministic", first.values(), second.values(), "two runs from the same start differ")

    def test_resume_is_exact(self) -> None:
        """A fresh optimizer that is given parameters and slots goes on bit for bit."""
        unbroken, saved, resumed = (Bench(self.made()) for _ in range(3))
        for _ in range(3):
            unbroken.step()
            saved.step()
        resumed.take(saved)
        for _ in range(3):
            unbroken.step()
            resumed.step()
        text = "a fresh optimizer given the slots of another goes on differently: there is state that slots() does not list"
        self._expect_equal("resume is exact", unbroken.values(), resumed.values(), text)

    def test_state_by_name(self) -> None:
        """State belongs to names: another order of parameters, or other groups, changes nothing."""
        saved, unbroken = Bench(self.made()), Bench(self.made())
        names = tuple(reversed(list(SHAPES)))
        reordered = Bench(self.made(), names, [("late", names[:2], {}), ("early", names[2:], {})])
        for _ in range(3):
            saved.step()
            unbroken.step()
        reordered.take(saved)
        unbroken.step()
        reordered.step()
        text = "after the order of the parameters changed, state went to another parameter: key it by name, never by position"
        self._expect_equal("state by name", unbroken.values(), reordered.values(), text)

    def test_slots_exist_before_the_first_step(self) -> None:
        """slots() lists every parameter's tensors before any step, and they are the ones that steps change."""
        bench = Bench(self.made())
        slots = bench.optimizer.slots()
        if set(slots) != set(SHAPES):
            broken("slots are created eagerly", f"slots() lists {sorted(slots)}, the parameters are {sorted(SHAPES)}.")
        before = {name: {slot: (tensor, tensor.clone()) for slot, tensor in held.items()} for name, held in slots.items()}
        bench.step()
        for name, held in bench.optimizer.slots().items():
            if held.keys() != before[name].keys():
                broken("slots are created eagerly", f"{name} has slots {sorted(held)} after a step and had {sorted(before[name])} before.")
            for slot, tensor in held.items():
                if tensor.untyped_storage().data_ptr() != before[name][slot][0].untyped_storage().data_ptr():
                    broken(
                        "slots are live",
                        f"{name}: step() replaced the tensor of slot {slot!r}, so a checkpoint loaded into it before is lost.",
                    )
        if any(before.values()) and all(
            torch.equal(t, bench.optimizer.slots()[n][s]) for n, h in before.items() for s, (_, t) in h.items() if t.numel()
        ):
            broken("slots are live", "a step changed no slot although the optimizer lists some.")

    def test_slots_match_elements(self) -> None:
        """A slot has its parameter's elements, or is a scalar: otherwise no layout says which part of it a rank holds."""
        for name, held in Bench(self.made()).optimizer.slots().items():
            for slot, tensor in held.items():
                if tensor.ndim and tensor.numel() != math.prod(SHAPES[name]):
                    broken("slots match elements", f"{name} has {math.prod(SHAPES[name])} elements and its slot {slot!r} {tensor.numel()}.")

    def test_factor_scales_the_learning_rate(self) -> None:
        """step(factor) moves by factor times as much; step(0) not at all."""
        still, half, full = (Bench(self.quiet()) for _ in range(3))
        start = still.values()
        still.step(0.0)
        half.step(0.5)
        full.step(1.0)
        for name, value in start.items():
            if not torch.equal(still.values()[name], value):
                broken("factor scales the learning rate", f"step(0) changed {name}.")
            moved, expected = half.values()[name] - value, (full.values()[name] - value) / 2
            if not torch.allclose(moved, expected, rtol=1e-3, atol=1e-6):
                broken("factor scales the learning rate", f"step(0.5) does not move {name} by half of what step(1) does.")

    def test_factor_may_be_a_tensor(self) -> None:
        """step(factor) takes a 0-d tensor in place of a number: a captured step has its schedule there."""
        number, tensor = Bench(self.made()), Bench(self.made())
        for _ in range(2):
            number.step(0.5)
            tensor.step(torch.tensor(0.5))
        for name, value in number.values().items():
            if not torch.allclose(value, tensor.values()[name], rtol=1e-4, atol=1e-6):
                broken("factor may be a tensor", f"{name}: step(torch.tensor(0.5)) does not do what step(0.5) does.")

    def test_names_choose_what_is_updated(self) -> None:
        """step(factor, names) updates only these; disjoint sets that cover all are one step."""
        whole, parted, names = Bench(self.made()), Bench(self.made()), list(SHAPES)
        before = parted.values()
        parted.step(parts=[names[1:3]])
        for name in [*names[:1], *names[3:]]:
            if not torch.equal(before[name], parted.values()[name]):
                broken("names choose what is updated", f"step(1.0, {names[1:3]}) changed {name}.")
        parted = Bench(self.made())
        for _ in range(2):
            whole.step()
            parted.step(parts=[names[1:3], [*names[:1], *names[3:]]])
        for name, value in whole.values().items():
            if not torch.allclose(value, parted.values()[name], rtol=1e-3, atol=1e-4):
                broken("names choose what is updated", f"{name}: two calls for disjoint names that cover all differ from one call.")

    def test_parameters_without_gradient_are_left_alone(self) -> None:
        """Parameters whose grad is None keep value and state."""
        bench, without = Bench(self.made()), ["layers.0.wide.weight", "layers.0.norm.weight"]
        bench.step()
        values = bench.values()
        slots = {name: {slot: tensor.clone() for slot, tensor in bench.optimizer.slots()[name].items()} for name in without}
        bench.step(without=without)
        for name in without:
            if not torch.equal(bench.parameters[name].detach(), values[name]):
                broken("no gradient, no change", f"{name} had grad None and was changed.")
            if any(not torch.equal(tensor, slots[name][slot]) for slot, tensor in bench.optimizer.slots()[name].items()):
                broken("no gradient, no change", f"{name} had grad None and its slots were changed.")

    def test_only_given_parameters_change(self) -> None:
        """A frozen parameter is in no group, and stays."""
        names = tuple(name for name in SHAPES if "norm" not in name)
        bench = Bench(self.made(), tuple(SHAPES), [("default", names, {})])
        frozen = bench.values()["layers.0.norm.weight"]
        bench.step()
        if not torch.equal(bench.parameters["layers.0.norm.weight"].detach(), frozen):
            broken("frozen stays frozen", "a parameter that is in no group was changed.")

    def test_weight_decay_is_decoupled(self) -> None:
        """weight_decay adds -lr x weight_decay x parameter to the update and nothing else."""
        decay = 0.25
        plain, decayed = Bench(self.quiet()), Bench(self.made(**{**self._zero_decays(), "weight_decay": decay}))
        start, lr = plain.values(), self.made().lr
        plain.step()
        decayed.step()
        seen = False
        for name, value in start.items():
            extra = decayed.values()[name] - plain.values()[name]
            expected = -lr * decay * value
            if torch.allclose(extra, expected, rtol=1e-3, atol=1e-6):
                seen |= value.numel() > 0
            elif bool(extra.abs().max() > 1e-7):
                broken(
                    "weight decay is decoupled",
                    f"{name}: it moved by {extra.flatten()[0]:g} more, not by -lr x weight_decay x parameter = {expected.flatten()[0]:g}.",
                )
        if not seen:
            broken("weight decay is decoupled", "weight_decay had no effect on any parameter.")

    def _zero_decays(self) -> dict[str, float]:
        return {name: 0.0 for name in chz.chz_fields(type(self.made())) if name.endswith("weight_decay")}

    def test_groups_override_fields(self) -> None:
        """A group's options replace the config's fields; an unknown one is a UsageError that names the group."""
        names = tuple(SHAPES)
        matrices = tuple(name for name in names if "wide" in name or "tall" in name)
        rest = tuple(name for name in names if name not in matrices)
        bench = Bench(self.quiet(), names, [("slow", matrices, {"lr": 0.0}), ("default", rest, {})])
        start = bench.values()
        bench.step()
        for name in matrices:
            if not torch.equal(bench.parameters[name].detach(), start[name]):
                broken("groups override fields", f"group `slow` has lr 0 and {name} moved.")
        if bench.optimizer.learning_rates().get("slow") != 0.0:
            broken("groups override fields", f"learning_rates() is {dict(bench.optimizer.learning_rates())}; group `slow` has lr 0.")
        try:
            Bench(self.made(), names, [("odd", names, {"no_such_field": 1.0})])
        except UsageError as error:
            if "odd" not in str(error):
                broken("groups override fields", f"the error for an unknown option does not name the group: {error}")
        else:
            broken("groups override fields", "an unknown option of a group was accepted.")

    def _expect_equal(self, promise: str, first: Mapping[str, Tensor], second: Mapping[str, Tensor], sentence: str) -> None:
        for name, value in first.items():
            if not torch.equal(value, second[name]):
                difference = float((value - second[name]).abs().max())
                broken(promise, f"{sentence} ({name} by up to {difference:g}).")
