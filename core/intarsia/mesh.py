"""The named device mesh: degrees of parallelism checked against the number of processes, coordinates, and a communicator for any axes.

Importing this imports no torch; degrees are checked before any process group exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from intarsia.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import torch

    from intarsia.comm import Communicator
    from intarsia.config import MeshConfig

# The axes that span the processes, outermost first: a rank is the row-major index of its coordinates.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

# The last three axes seen as two others, outermost first: `ep` has its neighbouring ranks, `ep_shard` the ranks of equal `ep` coordinate.
FOLDED = ("ep_shard", "ep")


def check_mesh(config: MeshConfig, world: int) -> dict[str, int]:
    """The size of every axis (`AXES`, then `ep`), -1 worked out. Raises UsageError, with the numbers, when they do not multiply out.

    `world` is the number of processes. Stability: stable.
    """
    sizes = {axis: int(getattr(config, axis)) for axis in (*AXES, "ep")}
    for axis, size in sizes.items():
        if size < 1 and not (axis == "dp_shard" and size == -1):
            raise UsageError(f"mesh.{axis} is {size}; it must be at least 1{' (or -1: all that are left)' if axis == 'dp_shard' else ''}.")
    others = math.prod(sizes[axis] for axis in AXES if axis != "dp_shard")
    spelled = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if axis != "dp_shard" and sizes[axis] > 1) or "1"
    if sizes["dp_shard"] == -1:
        if world % others:
            raise UsageError(
                f"mesh: {world} process{'es' * (world > 1)} cannot be shared out: {spelled}{f' = {others}' * (' x ' in spelled)} does not divide {world}, so "
                f"nothing whole is left for dp_shard. Start a multiple of {others} processes, or change the degrees."
            )
        sizes["dp_shard"] = world // others
    total = others * sizes["dp_shard"]
    if total != world:
        spelled = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes[axis] > 1) or "all degrees 1"
        raise UsageError(
            f"mesh: {spelled} needs {total} process{'es' * (total > 1)}, but there {'is' if world == 1 else 'are'} {world}. Start {total} "
            f"(torchrun --nproc-per-node {total} ...), or change the degrees (dp_shard=-1 takes what is left)."
        )
    folded = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    if folded % sizes["ep"]:
        raise UsageError(
            f"mesh: ep {sizes['ep']} does not divide dp_shard {sizes['dp_shard']} x cp {sizes['cp']} x tp {sizes['tp']} = {folded}, "
            f"out of which expert parallelism is folded. Choose ep among the divisors of {folded}, or another dp_shard, cp or tp."
        )
    return sizes


def full_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of all axes (`AXES`, then `FOLDED`), those that `sizes` leaves out being 1. Stability: provisional."""
    full = {axis: sizes.get(axis, 1) for axis in (*AXES, *FOLDED)}
    return full | {"ep_shard": math.prod(full[axis] for axis in AXES[2:]) // full["ep"]}


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """The index of process `rank` along every axis of a mesh of `full_sizes`. Stability: provisional."""
    places: dict[str, int] = {}
    rest, places["ep"] = divmod(rank, sizes["ep"])
    places["ep_shard"] = rest % sizes["ep_shard"]
    for axis in reversed(AXES):
        rank, places[axis] = divmod(rank, sizes[axis])
    return {axis: places[axis] for axis in (*AXES, *FOLDED)}


def copies_along(named: Iterable[str]) -> set[str]:
    """The axes along which every rank has a copy of a tensor whose layout has the axes `named`: those it does not name, except that a pipeline stage
    has its own. Stability: provisional."""
    named = set(named)
    return {*(("dp_replicate", *FOLDED) if named & set(FOLDED) else AXES[1:])} - named


class Mesh:
    """This process's place in the mesh. Stability: stable.

    `sizes` are those of `check_mesh`; `coordinates` hold this process's index along every axis; `stage` is the group of this rank's pipeline
    stage. The expert-parallel group of a rank (axis `ep`) are the `ep` neighbouring ranks of its block dp_shard x cp x tp; the ranks of the block with the same
    coordinate in their groups are the axis `ep_shard`.
    """

    def __init__(self, sizes: Mapping[str, int], world: Communicator) -> None:
        self.sizes = full_sizes(sizes)
        self.world = world
        if math.prod(self.sizes[axis] for axis in AXES) != world.size:
            raise UsageError(f"mesh: the degrees {dict(sizes)} do not multiply out to the {world.size} processes of group {world.name!r}.")
        self.coordinates = coordinates(self.sizes, world.rank)
        self._groups: dict[tuple[str, ...], Communicator] = {}
        # Torch names a group by its ranks and by how many groups they have made: what joins stages is made now, while that is equal on all ranks. Groups
        # inside a stage are parts of the stage's, and stages need not make the same ones.
        size = world.size // self.sizes["pp"]
        self.stage = (
            world if size == world.size else world.split([range(first, first + size) for first in range(0, world.size, size)], "stage")
        )
        self.comm("pp")

    @property
    def device(self) -> torch.device:
        """Where this process's tensors live."""
        return self.world.device

    @property
    def data_rank(self) -> int:
        """Which part of each global batch this process trains on; ranks that differ along cp, tp or pp share one."""
        return self.coordinates["dp_replicate"] * self.sizes["dp_shard"] + self.coordinates["dp_shard"]

    @property
    def data_ranks(self) -> int:
        """Into how many parts a global batch is cut."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    def comm(self, *axes: str) -> Communicator:
        """The group of the ranks that differ from this one along `axes` only, in mesh order whatever the order of `axes`. Cached.

        The first call for given axes is a collective of this rank's pipeline stage, whose ranks make it at the same place. The group of `pp` alone is there
        from the start; other axes with `pp` are a collective of the whole world, and must come before anything that not all stages do.
        """
        for axis in axes:
            if axis not in self.sizes:
                raise UsageError(f"There is no mesh axis {axis!r}. {did_you_mean(axis, self.sizes)}")
        if set(FOLDED) & set(axes) and len(axes) > 1:
            raise UsageError(
                f"The mesh axes 'ep' and 'ep_shard' are folded out of dp_shard, cp and tp and cannot be joined with others: {axes}."
            )
        key = tuple(axis for axis in (*AXES, *FOLDED) if axis in axes and self.sizes[axis] > 1)
        if key not in self._groups:
            self._groups[key] = self._make(key)
        return self._groups[key]

    def _make(self, axes: tuple[str, ...]) -> Communicator:
        whole, first = (self.world, 0) if "pp" in axes else (self.stage, self.world.rank - self.stage.rank)
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(whole.size):
            place = coordinates(self.sizes, first + rank)
            spanning = (*AXES[:2], *FOLDED) if axes and axes[0] in FOLDED else AXES
            fixed = tuple(place[axis] for axis in spanning if axis not in axes)
            members.setdefault(fixed, []).append(rank)
        groups = list(members.values())
        if len(groups) == 1:
            return whole
        if not axes:
            from intarsia.comm import SelfCommunicator

            return SelfCommunicator(self.device)
        return whole.split(groups, "+".join(axes))
