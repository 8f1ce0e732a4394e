"""Who orthogonalises which matrix. A matrix that is whole somewhere is worked on where it lies; one that is cut gets an owner, and a planned transfer.

Newton-Schulz needs the whole matrix: applied to the parts of one it gives something else. Everything here follows from layouts alone, so that all
ranks come to the same answer without talking.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from intarsia.errors import PluginError
from intarsia.layout import Box, Layout, Region, region_numel
from intarsia_transfer import Transfer, transfer

from intarsia_optimizers.matrices import flops, inside

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.mesh import Mesh

# The order of a mesh's axes, and of the two that its inner block is folded into: a group's ranks are numbered so.
ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep_shard", "ep")

Axes = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Journey:
    """How a cut parameter's matrices get to their owners: from the parts (`parts`) to whole matrices (`owned`), and back. Ranks are those of the group over `axes`."""

    axes: Axes
    parts: Layout
    owned: Layout

    @functools.cached_property
    def there(self) -> Transfer:
        """From parts to whole matrices."""
        return transfer(self.parts, self.owned)

    @functools.cached_property
    def back(self) -> Transfer:
        """From whole matrices to parts."""
        return transfer(self.owned, self.parts)

    def wire_bytes(self, rank: int, widths: tuple[int, int]) -> int:
        """What `rank` receives over the wire in one step, both ways, where an element takes `widths` bytes there and back: what it is to hold, less what it holds already."""
        part, owned = self.parts.local(rank), self.owned.local(rank)
        common = sum(box.numel for one in owned for other in part if (box := one.intersect(other)) is not None)
        return (region_numel(owned) - common) * widths[0] + (region_numel(part) - common) * widths[1]


@dataclasses.dataclass(frozen=True)
class Ownership:
    """The answer: a journey for each parameter that has a cut matrix, and each rank's load by axes (FLOPs of Newton-Schulz), of matrices whole and cut."""

    journeys: Mapping[str, Journey]
    loads: Mapping[Axes, Sequence[float]]


def cut_axes(name: str, layout: Layout) -> Layout:
    """`layout` over the axes that cut it, in the mesh's order; replicas do the same each. Raises PluginError where a reduction is pending."""
    if layout.pending:
        raise PluginError(f"Parameter {name!r} has a pending reduction along {layout.pending[0][0]!r}: an optimizer needs its value.")
    axes = [axis for axis, kind in zip(layout.axes, layout.kinds, strict=True) if kind == "cut"]
    ordered = sorted(range(len(axes)), key=lambda index: ORDER.index(axes[index][0]) if axes[index][0] in ORDER else -1)
    regions = []
    for coordinates in itertools.product(*(range(axes[index][1]) for index in ordered)):
        piece = 0
        for (_, size), coordinate in zip(axes, [coordinates[ordered.index(index)] for index in range(len(axes))], strict=True):
            piece = piece * size + coordinate
        regions.append(layout.regions[piece])
    found = Layout(layout.shape, layout.dtype, (), (), tuple(regions))
    for index in ordered:
        found = found.with_axis(*axes[index], "cut", found.regions)
    return found


def find_ownership(layouts: Mapping[str, Layout], matrices: Mapping[str, Sequence[Box]], steps: int) -> Ownership:
    """Where each parameter's matrices are worked on. `layouts` and `matrices` by parameter; `steps` are Newton-Schulz's.

    Owners of cut matrices are chosen by falling cost, each the rank with the least so far, a matrix's cost being its share of all FLOPs plus its share
    of all elements: time and memory together. Among equals the one that holds most of the matrix.
    """
    total_flops = sum(flops(box, steps) for boxes in matrices.values() for box in boxes) or 1.0
    total_elements = sum(box.numel for boxes in matrices.values() for box in boxes) or 1
    costs: dict[Axes, list[float]] = {}
    loads: dict[Axes, list[float]] = {}
    owners: dict[str, dict[int, int]] = {}  # parameter -> matrix -> piece
    reduced = {name: cut_axes(name, layout) for name, layout in layouts.items()}

    def give(name: str, number: int, piece: int) -> None:
        box, axes = matrices[name][number], reduced[name].axes
        costs.setdefault(axes, [0.0] * reduced[name].ranks)[piece] += flops(box, steps) / total_flops + box.numel / total_elements
        loads.setdefault(axes, [0.0] * reduced[name].ranks)[piece] += flops(box, steps)
        owners.setdefault(name, {})[number] = piece

    for name, layout in reduced.items():
        for piece, region in enumerate(layout.regions):
            for number, _, _ in inside(region, matrices[name]):
                give(name, number, piece)
    cut = [(name, number) for name, boxes in matrices.items() for number in range(len(boxes)) if number not in owners.get(name, {})]
    for name, number in sorted(cut, key=lambda pair: -flops(matrices[pair[0]][pair[1]], steps)):
        box, layout = matrices[name][number], reduced[name]
        so_far = costs.setdefault(layout.axes, [0.0] * layout.ranks)
        held = [sum(common.numel for part in region if (common := part.intersect(box)) is not None) for region in layout.regions]
        give(name, number, min(range(layout.ranks), key=lambda piece: (so_far[piece], -held[piece], piece)))
    journeys = {}
    for name in dict.fromkeys(name for name, _ in cut):
        journeys[name] = _journey(reduced[name], matrices[name], owners[name])
    return Ownership(journeys, loads)


def _journey(parts: Layout, boxes: Sequence[Box], owner: Mapping[int, int]) -> Journey:
    regions = [merged([box for number, box in enumerate(boxes) if owner[number] == piece]) for piece in range(parts.ranks)]
    # Every matrix has one owner, so the regions are a disjoint cover; checking that again for thousands of experts takes long.
    owned = dataclasses.replace(parts, regions=tuple(regions))
    return Journey(parts.axes, parts, owned)


def merged(boxes: Sequence[Box]) -> Region:
    """`boxes`, ordered by their beginning, with those joined that follow each other along the first dimension: the storage stays the same."""
    found: list[Box] = []
    for box in boxes:
        last = found[-1] if found else None
        if last is not None and last.end[0] == box.start[0] and (last.start[1:], last.size[1:]) == (box.start[1:], box.size[1:]):
            found[-1] = Box(last.start, (last.size[0] + box.size[0], *last.size[1:]))
        else:
            found.append(box)
    return tuple(found)


def group_of(axes: Axes, mesh: Mesh | None, comm: Communicator) -> Communicator:
    """The ranks over which a journey goes, numbered as its layouts number them. Every rank asks for the same axes in the same order."""
    names = {name for name, size in axes if size > 1}
    if mesh is not None:
        folded = {"ep", "ep_shard"} <= names
        comm = mesh.comm(*({"dp_shard", "cp", "tp"} | (names - {"ep", "ep_shard"}) if folded else names))
    size = math.prod(size for _, size in axes)
    if comm.size != size:
        raise PluginError(f"Muon: the group over {', '.join(sorted(names))} has {comm.size} ranks, and a layout counts {size}.")
    return comm


def cut_text(name: str, layout: Layout) -> str:
    """What cuts a parameter, for people."""
    axes = [f"{axis} ({size})" for (axis, size), kind in zip(layout.axes, layout.kinds, strict=True) if kind == "cut" and size > 1]
    return f"{name} (shape {list(layout.shape)}, cut by {' and '.join(axes)}, {region_numel(layout.regions[0])} elements on the first rank)"
