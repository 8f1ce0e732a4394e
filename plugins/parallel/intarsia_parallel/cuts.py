"""How tensor parallelism cuts a parameter, and what is left of it on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from intarsia.contracts import Box, Member, Partition, Placement, Region
from intarsia.errors import UsageError
from intarsia_placements.layouts import build_layouts
from torch import nn

from intarsia_parallel.collectives import even_counts

if TYPE_CHECKING:
    from intarsia.mesh import Mesh
    from intarsia.parameters import ParameterTable


@dataclasses.dataclass(unsafe_hash=True)
class EvenCut:
    """An `intarsia.contracts.Placement`: dimension `dim` in units of `unit`, shared out as `even_counts` does. Stability: provisional.

    Activations along the same dimension are cut by the same rule, which is why this is not a placement of the user's choice. Equal by value; not to be changed.
    """

    dim: int
    unit: int = 1
    accepts: Literal["box", "region"] = "box"
    name: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.name = f"even cut(dim={self.dim}{f', unit={self.unit}' if self.unit > 1 else ''})"

    def counts(self, length: int, ranks: int) -> list[int]:
        """Sizes of the ranks' parts of a dimension of `length`; the last unit may be short."""
        ends, units = [], 0
        for count in even_counts(-(-length // self.unit), ranks):
            units += count
            ends.append(min(units * self.unit, length))
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """See `intarsia.contracts.Placement`."""
        return Partition(tuple(members), ranks, tuple(self._cut(member, ranks) for member in members))

    def _cut(self, member: Member, ranks: int) -> tuple[Region, ...]:
        if self.dim >= len(member.shape):
            raise UsageError(f"{self.name} cannot cut {member.name!r} of shape {member.shape}: it has no dimension {self.dim}.")
        regions: list[Region] = []
        begin = 0
        for count in self.counts(member.shape[self.dim], ranks):
            if member.tile is not None and begin % member.tile[self.dim] and count:
                raise UsageError(
                    f"{self.name} of {member.name!r} ({member.shape}) over {ranks} ranks begins a part at {begin}, inside a tile of {member.tile[self.dim]} that "
                    f"shares one scale. Set the role's unit to {member.tile[self.dim]}, or choose a degree whose parts are multiples of it."
                )
            start = tuple(begin if d == self.dim else 0 for d in range(len(member.shape)))
            size = (*member.shape[: self.dim], count, *member.shape[self.dim + 1 :])
            regions.append((Box(start, size),) if Box(start, size).numel else ())
            begin += count
        return tuple(regions)


# A parameter's cuts, outermost first: (mesh axis, placement).
Cuts = tuple[tuple[str, Placement], ...]


def local_box(name: str, shape: Sequence[int], cuts: Cuts, mesh: Mesh) -> Box:
    """The box that this rank's modules have of a parameter. Raises UsageError where it is none, or several."""
    steps = [(axis, mesh.sizes[axis], placement) for axis, placement in cuts]
    layout = build_layouts([Member(name, tuple(shape))], steps)[name]
    rank = 0
    for axis, size in layout.axes:
        rank = rank * size + mesh.coordinates[axis]
    region = layout.local(rank)
    if len(region) != 1:
        left = "nothing" if not region else f"{len(region)} boxes"
        spelled = ", ".join(f"{placement.name} over {axis} {mesh.sizes[axis]}" for axis, placement in cuts)
        raise UsageError(
            f"Parameter {name!r} of shape {tuple(shape)}: {spelled} leaves {left} on rank {mesh.world.rank}; a module holds one box."
        )
    return region[0]


def cut_parameters(model: nn.Module, table: ParameterTable, mesh: Mesh, cuts: Mapping[str, Cuts]) -> None:
    """Give the model's own parameters (on the meta device) the shapes of their local parts, and write the cuts into the table's `outer`.

    Ties stay ties. A Linear's `in_features` and `out_features` become the local ones: what modules say of themselves (caches, FLOPs) is then about what
    this rank computes.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, steps in cuts.items():
        info = table[name]
        box = local_box(name, info.shape, steps, mesh)
        old = model.get_parameter(name)
        new = nn.Parameter(torch.empty(box.size, dtype=old.dtype, device=old.device), requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        for alias in (name, *info.aliases):
            owner, _, attribute = alias.rpartition(".")
            modules[owner]._parameters[attribute] = new
            _resize(modules[owner], attribute, box.size)
        info.outer = tuple((axis, mesh.sizes[axis], placement) for axis, placement in steps)


def _resize(module: Any, attribute: str, shape: Sequence[int]) -> None:
    if isinstance(module, nn.Linear) and attribute == "weight":
        module.out_features, module.in_features = shape
