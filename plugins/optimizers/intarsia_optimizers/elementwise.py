"""What all elementwise optimizers share: parameters in runs, their state, the count of updates, and a step of few launches.

An optimizer says what a step does to flat tensors (a `Rule`); `Elementwise` finds the runs, keeps the slots and hands the rule lists of flat tensors. An
elementwise update needs no layout: whatever part of a parameter is here is updated here.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from intarsia_optimizers.runs import Member, Order, Piece, allocate, local_member, pieces_of
from intarsia_optimizers.updates import Box, Gradient, Scalar, Tensors, summed, widened
from intarsia_optimizers.wires import Part, Sums, Wire, gradient_in, part_of

if TYPE_CHECKING:
    from intarsia.parameters import ParameterTable


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    """An elementwise update with its settings. Parameters of equal rules are updated together.

    `slots` are the names of its state tensors; `counted` says that it needs the number of updates, kept as the scalar slot `step`.
    """

    lr: float
    weight_decay: float
    slots: ClassVar[tuple[str, ...]] = ()
    counted: ClassVar[bool] = False

    @property
    def takes_sums(self) -> bool:
        """Whether `special` and `quantising` take contributions to a gradient that have not been added (see `intarsia_optimizers.wires`)."""
        return False

    @abc.abstractmethod
    def plain(self, values: Tensors, gradients: Tensors, states: Sequence[Tensors], steps: Tensors, lr: Scalar) -> None:
        """Update `values` and `states` (a list for each slot) in place; everything of one dtype. `steps` has each one's 0-d number of this update, from 1, or
        is empty where the rule does not count. `lr` is `self.lr` times the schedule's factor."""

    def special(
        self, value: Tensor, low: Tensor | None, states: Sequence[Tensor], gradient: Gradient, step: Tensor | None, lr: Scalar
    ) -> None:
        """Update one flat tensor whose master is split, or whose state is of another dtype."""
        steps = [] if step is None else [step]
        widened(lambda values, gradients, held: self.plain(values, gradients, held, steps, lr), value, low, states, summed(gradient))

    def quantising(
        self,
        value: Tensor,
        low: Tensor | None,
        states: Sequence[Tensor],
        gradient: Gradient,
        step: Tensor | None,
        lr: Scalar,
        boxes: tuple[Box, ...],
        wire: Wire,
    ) -> bool:
        """Update the boxes of one flat tensor and quantise them to the wire (see `intarsia_optimizers.wires`), or do nothing and say False."""
        return False


class Counter:
    """How often each of several parameters was updated: float32 numbers on their device, and on the host as far as telling which are equal.

    A loaded checkpoint changes the tensor from outside, which its version shows; the host reads it once then. A replayed graph changes all
    counts of a piece alike, which keeps equal what is equal.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = list(names)
        self.tensor = torch.zeros(len(names), dtype=torch.float32, device=device)
        self.scalars = dict(zip(names, self.tensor.unbind(), strict=True))
        self.known = dict.fromkeys(names, 0.0)
        self._version = self.tensor._version

    def refresh(self) -> bool:
        """Whether the tensor was changed from outside; the host knows its values afterwards."""
        if self.tensor._version == self._version:
            return False
        self.known = dict(zip(self.names, self.tensor.tolist(), strict=True))
        self._version = self.tensor._version
        return True

    def mask(self, names: Collection[str]) -> Tensor | None:
        """What `add` takes for these names; None: all."""
        if len(names) == len(self.names):
            return None
        mask = torch.zeros_like(self.tensor)
        for index, name in enumerate(self.names):
            if name in names:
                mask[index].fill_(1.0)
        return mask

    def add(self, names: Collection[str], mask: Tensor | None) -> None:
        """One more update of each of `names`."""
        self.tensor.add_(1.0 if mask is None else mask)
        for name in names:
            self.known[name] += 1
        self._version = self.tensor._version


@dataclasses.dataclass(eq=False)
class _Plan:
    """How a set of parameters is updated: for each rule its pieces, and where the gradients of each piece's members are in the list of all."""

    work: list[tuple[Rule, list[tuple[Piece, slice]]]]
    order: list[nn.Parameter]
    counted: list[tuple[Counter, list[str], Tensor | None]]
    splits: bool  # members of one run are counted apart from now on
    parts: dict[tuple[int, int], Part | None] = dataclasses.field(default_factory=dict)  # by piece and wire


class Elementwise:
    """Parameters under elementwise rules.

    Arguments: `parts` are (rule, local parameters by name); `state_dtype` is `master` or `bfloat16`; `order` knows the optimizer's other parameters too, if there are
    any. Parameters without a gradient keep value and state.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Rule, Mapping[str, nn.Parameter]]],
        table: ParameterTable,
        state_dtype: str = "master",
        order: Order | None = None,
    ) -> None:
        self._rules: dict[Rule, list[Member]] = {}
        for rule, parameters in parts:
            members = self._rules.setdefault(rule, [])
            members += [local_member(name, parameter, table) for name, parameter in parameters.items()]
        self.members = {member.name: member for members in self._rules.values() for member in members}
        order = order or Order({name: member.parameter for name, member in self.members.items()}, table)
        self._runs = {rule: allocate(members, rule.slots, state_dtype, order) for rule, members in self._rules.items()}
        counted: dict[torch.device, list[str]] = {}
        for rule, members in self._rules.items():
            for member in members if rule.counted else ():
                counted.setdefault(member.value.device, []).append(member.name)
        self._counters = [Counter(names, device) for device, names in counted.items()]
        self._scalars = {name: scalar for counter in self._counters for name, scalar in counter.scalars.items()}
        self._chosen: dict[frozenset[str] | None, list[Member]] = {None: list(self.members.values())}
        self._plans: dict[tuple[str, ...], _Plan] = {}

    @property
    def takes_sums(self) -> bool:
        """Whether `step` takes `sums`."""
        return all(rule.takes_sums for rule in self._rules)

    def slots(self) -> dict[str, dict[str, Tensor]]:
        """State by parameter name and slot name; live."""
        found = {name: member.slots() for name, member in self.members.items()}
        for name, scalar in self._scalars.items():
            found[name]["step"] = scalar
        return found

    @torch.no_grad()
    def step(
        self, factor: Scalar, names: Collection[str] | None = None, wires: Sequence[Wire] = (), sums: Sums | None = None
    ) -> list[Wire]:
        """One update of those of `names` (None: all) that have a gradient, or are in `sums`. Returns those of `wires` on which everything was quantised."""
        chosen = self._choose(names)
        active = [member for member in chosen if (member.parameter.grad is not None if sums is None else member.parameter in sums.begins)]
        if not active:
            return []
        changed = [counter.refresh() for counter in self._counters]
        if any(changed):
            self._plans.clear()
        key = tuple([member.name for member in active])
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make(active)
        for counter, counted, mask in plan.counted:
            counter.add(counted, mask)
        gradients = Given([parameter.grad for parameter in plan.order]) if sums is None else Unsummed(sums)  # type: ignore[misc]
        written = [0] * len(wires)
        for rule, pieces in plan.work:
            if wires:
                pieces = [item for item in pieces if not self._quantise(rule, item, gradients, factor, wires, written, plan)]
            self._update(rule, pieces, gradients, factor)
        if plan.splits:
            # Other plans may hold as one piece what is counted apart now.
            self._plans = {key: plan}
        return [wire for wire, boxes in zip(wires, written, strict=True) if boxes == sum(box[3] * box[4] > 0 for box in wire.boxes)]

    def _quantise(
        self,
        rule: Rule,
        item: tuple[Piece, slice],
        gradients: Given | Unsummed,
        factor: Scalar,
        wires: Sequence[Wire],
        written: list[int],
        plan: _Plan,
    ) -> bool:
        """Update a piece that lies in the shard of one of `wires`, and quantise it; False: that was not possible. `written` counts boxes by wire."""
        piece, own = item
        whole = gradients.of(piece, own)
        for number, wire in enumerate(wires if whole is not None else ()):
            key = (id(piece), wire.wire.data_ptr())
            if key not in plan.parts:
                plan.parts[key] = part_of(piece, wire)
            part = plan.parts[key]
            if part is None:
                continue
            assert whole is not None
            step = self._scalars[piece.members[0].name] if rule.counted else None
            lr = _rate(rule.lr, factor, piece.value.device)
            if not rule.quantising(piece.value, piece.low, piece.states, whole, step, lr, part.boxes, wire):
                return False
            apart = _apart(piece, gradients.apart(piece, own)) if part.others else []
            for place in part.others:
                value, low, states, gradient = apart[place]
                rule.special(value, low, states, gradient, step, lr)
            written[number] += len(part.boxes)
            return True
        return False

    def _choose(self, names: Collection[str] | None) -> list[Member]:
        key = None if names is None else frozenset(names)
        if key not in self._chosen:
            self._chosen[key] = [member for name, member in self.members.items() if name in key]  # type: ignore[operator]
        return self._chosen[key]

    def _make(self, active: Sequence[Member]) -> _Plan:
        """The plan for these members. Members of one run stay one piece while they were updated equally often."""
        names = {member.name for member in active}
        known = {name: count for counter in self._counters for name, count in counter.known.items()}
        work: list[tuple[Rule, list[tuple[Piece, slice]]]] = []
        order: list[nn.Parameter] = []
        splits = False
        for rule, members in self._rules.items():
            chosen = [member for member in members if member.name in names]
            pieces = []
            for piece in pieces_of(chosen, known if rule.counted else None):
                pieces.append((piece, slice(len(order), len(order) + len(piece.members))))
                order += [member.parameter for member in piece.members]
            if pieces:
                work.append((rule, pieces))
            splits |= rule.counted and any(len({member.name in names for member in run}) > 1 for run in self._runs[rule])
        counted = []
        for counter in self._counters:
            mine = [name for name in counter.names if name in names]
            if mine:
                counted.append((counter, mine, counter.mask(mine)))
        return _Plan(work, order, counted, splits)

    def _update(self, rule: Rule, pieces: Sequence[tuple[Piece, slice]], gradients: Given | Unsummed, factor: Scalar) -> None:
        """One rule's update: everything plain of one dtype and device in one call, what is special one by one."""
        plain: dict[tuple[torch.dtype, torch.device], tuple[Tensors, Tensors, list[Tensors], Tensors]] = {}
        for piece, own in pieces:
            whole = gradients.of(piece, own)
            step = self._scalars[piece.members[0].name] if rule.counted else None
            parts = [(piece.value, piece.low, piece.states, whole)] if whole is not None else _apart(piece, gradients.apart(piece, own))
            for value, low, states, gradient in parts:
                if piece.is_special or not isinstance(gradient, Tensor) or gradient.dtype != value.dtype:
                    rule.special(value, low, states, gradient, step, _rate(rule.lr, factor, value.device))
                    continue
                values, flats, kept, steps = plain.setdefault((value.dtype, value.device), ([], [], [[] for _ in states], []))
                values.append(value)
                flats.append(gradient)
                for held, state in zip(kept, states, strict=True):
                    held.append(state)
                if step is not None:
                    steps.append(step)
        for (_, device), (values, flats, kept, steps) in plain.items():
            rule.plain(values, flats, kept, steps, _rate(rule.lr, factor, device))


@dataclasses.dataclass(frozen=True)
class Given:
    """Gradients of a plan's parameters, in its order. A piece's own are a slice of them."""

    gradients: list[Tensor]

    def of(self, piece: Piece, own: slice) -> Gradient | None:
        """The piece's gradient, flat; None where its members' do not lie as they do."""
        return piece.gradient(self.gradients[own])

    def apart(self, piece: Piece, own: slice) -> list[Gradient]:
        """Its members' gradients, flat."""
        return [gradient.reshape(-1) for gradient in self.gradients[own]]


@dataclasses.dataclass(frozen=True)
class Unsummed:
    """The same of contributions that have not been added."""

    sums: Sums

    def of(self, piece: Piece, own: slice) -> Gradient | None:
        """See `Given.of`."""
        begins = self.sums.begins
        first = begins[piece.members[0].parameter]
        for member, offset in zip(piece.members, piece.offsets, strict=True):
            if begins[member.parameter] != first + offset:
                return None
        return gradient_in(self.sums, first, piece.value.numel())

    def apart(self, piece: Piece, own: slice) -> list[Gradient]:
        """See `Given.apart`."""
        return [gradient_in(self.sums, self.sums.begins[member.parameter], member.value.numel()) for member in piece.members]


def _apart(piece: Piece, gradients: Sequence[Gradient]) -> list[tuple[Tensor, Tensor | None, list[Tensor], Gradient]]:
    """The piece's members one by one: (value, low half, states, gradient), flat."""
    return [
        (member.value, member.low, list(member.states.values()), gradient)
        for member, gradient in zip(piece.members, gradients, strict=True)
    ]


def _rate(lr: float, factor: Scalar, device: torch.device) -> Scalar:
    return lr * (factor.to(device) if isinstance(factor, Tensor) else factor)


class ElementwiseOptimizer:
    """An `intarsia.contracts.Optimizer` that is elementwise throughout. `rates` are the base learning rates by group."""

    updates_split_masters = True

    def __init__(self, rates: Mapping[str, float], elementwise: Elementwise) -> None:
        self._rates, self._elementwise = rates, elementwise

    def step(self, factor: Scalar, names: Collection[str] | None = None) -> None:
        """One update; see `intarsia.contracts.Optimizer`."""
        self._elementwise.step(factor, names)

    @property
    def takes_sums(self) -> bool:
        """Whether `step_quantising` takes gradients that have not been added. See `intarsia_optimizers.wires`."""
        return self._elementwise.takes_sums

    def step_quantising(self, factor: Scalar, names: Collection[str] | None, wires: Sequence[Wire], sums: Sums | None = None) -> list[Wire]:
        """As `step`; and returns those of `wires` on which everything was quantised. See `intarsia_optimizers.wires`."""
        return self._elementwise.step(factor, names, wires, sums)

    def learning_rates(self) -> Mapping[str, float]:
        """Base learning rate of each group."""
        return self._rates

    def slots(self) -> Mapping[str, Mapping[str, Tensor]]:
        """State by parameter name and slot name."""
        return self._elementwise.slots()
