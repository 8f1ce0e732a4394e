"""Runs: parameters that lie one after the other in one storage, updated as one flat tensor. Found from the tensors' addresses alone.

A sharder keeps what a rank holds of a bucket in one buffer, of which parameters are views. An elementwise update of neighbours with equal
settings is one update of the buffer from the first's beginning to the last's end: few launches, whatever the number of parameters. State is allocated
likewise, one flat buffer for a run; a parameter's slots are views of it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import torch
from intarsia.contracts import ALIGNMENT_BYTES
from intarsia.errors import PluginError
from intarsia.layout import region_numel
from intarsia.parameters import ParameterTable
from torch import Tensor, nn

# Most elements of padding: members of bytes are aligned by so many.
PADDING = ALIGNMENT_BYTES - 1


@dataclasses.dataclass(eq=False)
class Member:
    """One parameter of a run. `value` and `low` are its elements and the low halves where its master is split, 1-D views; `begin` is where it
    begins in the run; `states` are 1-D views of the run's, by slot; `run` and `place` say which run, and which of its members this is."""

    name: str
    parameter: nn.Parameter
    value: Tensor
    low: Tensor | None
    begin: int = 0
    run: int = 0
    place: int = 0
    states: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def slots(self) -> dict[str, Tensor]:
        """The states in the parameter's shape."""
        return {slot: state.view(self.parameter.shape) for slot, state in self.states.items()}


@dataclasses.dataclass(eq=False)
class Piece:
    """Neighbouring members of one run as flat tensors that span them, padding between them included."""

    members: list[Member]
    value: Tensor
    low: Tensor | None
    states: list[Tensor]
    offsets: list[int]  # where each member begins, in elements from the first

    @functools.cached_property
    def is_special(self) -> bool:
        """Whether the master is split, or a state of another dtype."""
        return self.low is not None or any(state.dtype != self.value.dtype for state in self.states)

    def gradient(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """The members' gradients as one flat tensor, where they lie in one storage as the members do; else None."""
        first = gradients[0]
        if len(gradients) == 1:
            return first.view(-1) if first.is_contiguous() else None
        base, width = first.data_ptr(), first.element_size()
        for gradient, offset in zip(gradients, self.offsets, strict=True):
            if gradient.data_ptr() != base + offset * width or not gradient.is_contiguous() or gradient.dtype != first.dtype:
                return None
        span, begin = self.value.numel(), first.storage_offset()
        # Two storages may be neighbours by chance.
        if (begin + span) * width > first.untyped_storage().nbytes():
            return None
        return first.as_strided((span,), (1,), begin)


def local_member(name: str, parameter: nn.Parameter, table: ParameterTable) -> Member:
    """The member of a parameter. Raises PluginError, naming it, where its storage is not what its layout says."""
    info = table[name]
    low = info.low
    if not parameter.is_contiguous() or (low is not None and not low.is_contiguous()):
        raise PluginError(f"The local part of parameter {name!r} is not contiguous: a sharder keeps a region's elements in storage order.")
    if info.layout is not None:
        expected = region_numel(info.layout.local(table.rank_in(info.layout)))
        if parameter.numel() != expected:
            raise PluginError(
                f"The local part of parameter {name!r} has {parameter.numel()} elements, but its layout gives this rank {expected} of {list(info.shape)}."
            )
    if low is not None and (low.numel() != parameter.numel() or low.dtype != torch.int16 or parameter.dtype != torch.bfloat16):
        raise PluginError(
            f"The split master of parameter {name!r} is {parameter.dtype} {tuple(parameter.shape)} and {low.dtype} {tuple(low.shape)}; "
            "it must be bfloat16 and int16 of one shape."
        )
    return Member(name, parameter, parameter.detach().view(-1), None if low is None else low.detach().view(-1))


def master_dtype(member: Member) -> torch.dtype:
    """The dtype of what is updated: float32 where the master is split."""
    return member.value.dtype if member.low is None else torch.float32


def state_dtype_of(policy: str, member: Member) -> torch.dtype:
    """The dtype of a parameter's state under the policy `master` or `bfloat16`."""
    return torch.bfloat16 if policy == "bfloat16" else master_dtype(member)


def allocate(members: Sequence[Member], slots: Sequence[str], policy: str, order: Order) -> list[list[Member]]:
    """Find the runs among `members`, whose settings are equal, and give them zero state: `run`, `place`, `begin` and `states` are set. Returns the runs."""
    runs = find_runs(members, order)
    for number, run in enumerate(runs):
        first = int(run[0].value.storage_offset())
        dtype = state_dtype_of(policy, run[0])
        span = int(run[-1].value.storage_offset()) + run[-1].value.numel() - first
        buffers = {slot: torch.zeros(span, dtype=dtype, device=run[0].value.device) for slot in slots}
        for place, member in enumerate(run):
            member.run, member.place, member.begin = number, place, int(member.value.storage_offset()) - first
            part = slice(member.begin, member.begin + member.value.numel())
            member.states = {slot: buffer[part] for slot, buffer in buffers.items()}
    return runs


class Order:
    """Where all parameters lie that an optimizer knows of, and which follow each other in one storage with nothing but padding between.

    `parameters` are all of them, whatever their settings; a bucket that has frozen ones, which are nobody's to know, is taken to have no padding.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], table: ParameterTable) -> None:
        frozen = {info.bucket for info in table.values() if not info.trainable}
        self._exact = {name for name in parameters if table[name].bucket in frozen}
        held = [(_place(parameter), name) for name, parameter in parameters.items() if parameter.numel()]
        names = [name for _, name in sorted(held)]
        self._next = dict(itertools.pairwise(names))

    def joins(self, first: Member, second: Member) -> bool:
        """Whether `second` begins where `first` ends, but for padding; in the low halves too."""
        if self._next.get(first.name) != second.name or (first.low is None) != (second.low is None):
            return False
        if not _follows(first.value, second.value, 0 if first.name in self._exact else PADDING):
            return False
        if first.low is None or second.low is None:
            return True
        same = first.low.untyped_storage()._cdata == second.low.untyped_storage()._cdata
        return (
            same
            and second.low.storage_offset() - first.low.storage_offset() == second.value.storage_offset() - first.value.storage_offset()
        )


def find_runs(members: Sequence[Member], order: Order) -> list[list[Member]]:
    """`members` in groups of neighbours, each in the order of its storage; a member without elements is a group of its own."""
    runs = [[member] for member in members if not member.value.numel()]
    held = sorted((member for member in members if member.value.numel()), key=lambda member: _place(member.value))
    for index, member in enumerate(held):
        if index and order.joins(held[index - 1], member):
            runs[-1].append(member)
        else:
            runs.append([member])
    return runs


def _place(tensor: Tensor) -> tuple[str, int, int]:
    return str(tensor.device), tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _follows(first: Tensor, second: Tensor, padding: int) -> bool:
    if first.untyped_storage()._cdata != second.untyped_storage()._cdata or first.dtype != second.dtype:
        return False
    end = first.storage_offset() + first.numel()
    gap = second.storage_offset() - end
    if gap <= 0 or gap > padding:
        return gap == 0
    # Padding is zero, and an update leaves zeros zero. What is not zero belongs to somebody.
    return first.is_meta or not bool(first.as_strided((gap,), (1,), end).any())


def pieces_of(members: Sequence[Member], counts: Mapping[str, float] | None = None) -> list[Piece]:
    """Pieces of `members`, whose state is allocated: neighbours of one run, of equal `counts` where these are given. Members without elements are left out."""
    groups: list[list[Member]] = []
    for member in sorted((member for member in members if member.value.numel()), key=lambda member: (member.run, member.place)):
        last = groups[-1][-1] if groups else None
        joined = last is not None and last.run == member.run and last.place + 1 == member.place
        if joined and (counts is None or counts[last.name] == counts[member.name]):  # type: ignore[union-attr]
            groups[-1].append(member)
        else:
            groups.append([member])
    return [_piece(group) for group in groups]


def _piece(members: list[Member]) -> Piece:
    first, last = members[0], members[-1]
    span = last.begin + last.value.numel() - first.begin

    def spanning(tensor: Tensor) -> Tensor:
        return tensor.as_strided((span,), (1,), tensor.storage_offset())

    low = None if first.low is None else spanning(first.low)
    states = [spanning(state) for state in first.states.values()]
    return Piece(members, spanning(first.value), low, states, [member.begin - first.begin for member in members])
