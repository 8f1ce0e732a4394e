"""The named device mesh: degrees of parallelism checked against the number of processes, coordinates, and a communicator for any axes.

Importing this imports no torch; degrees are checked before any process group exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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

# Axes that this version's trainer runs with more than one rank.
SUPPORTED = ("dp_replicate", "dp_shard")


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
                f"mesh: {world} process{'es' * (world > 1)} cannot be shared out: {spelled} = {others} does not divide {world}, so nothing whole is "
                f"left for dp_shard. Start a multiple of {others} processes, or change the degrees."
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
            f"out of which expert parallelism is folded. Choose ep among the divisors of {folded}."
        )
    return sizes


def check_supported(sizes: Mapping[str, int]) -> None:
    """Raise UsageError for axes that this version's trainer does not run. Stability: provisional."""
    refused = [f"{axis} {size}" for axis, size in sizes.items() if axis not in SUPPORTED and size > 1]
    if refused:
        raise UsageError(f"mesh: {', '.join(refused)}: not supported yet. Supported with more than one rank: {', '.join(SUPPORTED)}.")


class Mesh:
    """This process's place in the mesh. Stability: stable.

    `sizes` are those of `check_mesh`; `coordinates` hold this process's index along every axis. The expert-parallel group of a rank (axis `ep`) are the
    `ep` neighbouring ranks of its block dp_shard x cp x tp; the ranks of the block with the same coordinate in their groups are the axis `ep_shard`.
    """

    def __init__(self, sizes: Mapping[str, int], world: Communicator) -> None:
        self.sizes = {axis: sizes.get(axis, 1) for axis in (*AXES, "ep")}
        self.sizes["ep_shard"] = math.prod(self.sizes[axis] for axis in AXES[2:]) // self.sizes["ep"]
        self.world = world
        if math.prod(self.sizes[axis] for axis in AXES) != world.size:
            raise UsageError(f"mesh: the degrees {dict(sizes)} do not multiply out to the {world.size} processes of group {world.name!r}.")
        self.coordinates = self._coordinates(world.rank)
        self._groups: dict[tuple[str, ...], Communicator] = {}

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

        The first call for given axes is a collective of the whole world; every rank makes it at the same place.
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
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world.size):
            place = self._coordinates(rank)
            spanning = (*AXES[:2], *FOLDED) if axes and axes[0] in FOLDED else AXES
            fixed = tuple(place[axis] for axis in spanning if axis not in axes)
            members.setdefault(fixed, []).append(rank)
        groups = list(members.values())
        if len(groups) == 1:
            return self.world
        if not axes:
            from intarsia.comm import SelfCommunicator

            return SelfCommunicator(self.device)
        return self.world.split(groups, "+".join(axes))

    def _coordinates(self, rank: int) -> dict[str, int]:
        places: dict[str, int] = {}
        rest, places["ep"] = divmod(rank, self.sizes["ep"])
        places["ep_shard"] = rest % self.sizes["ep_shard"]
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, self.sizes[axis])
        return {axis: places[axis] for axis in (*AXES, *FOLDED)}
