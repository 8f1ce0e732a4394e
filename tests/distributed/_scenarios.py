"""Small models, a foreign placement and a way to shard any module: what the tests of FlexShard's scenarios share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import chz
import torch
from intarsia.comm import Communicator
from intarsia.config import MeshConfig, PlacementConfig
from intarsia.contracts import Box, Init, Member, Partition, Region, Regions
from intarsia.layout import slices
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable
from intarsia.plugins import current
from intarsia_eager.config import WholeConfig
from intarsia_eager.whole import build as build_whole
from intarsia_flexshard.config import FlexShardConfig
from intarsia_flexshard.runtime import FlexShard
from torch import Tensor, nn
from torch.nn import functional


@chz.chz
class Slabs(PlacementConfig):
    """Of somebody else's: dimension 0 in as many equal blocks as `shares` has together, and so many of them for each rank. No entry, and boxes alone."""

    shares: tuple[int, ...] = chz.field(default=(1, 1), doc="Blocks of each rank.")
    combed: bool = chz.field(default=False, doc="Blocks go round: the first to each rank, then the second.")


class SlabPlacement:
    """What `Slabs` chooses."""

    accepts = "box"

    def __init__(self, config: Slabs) -> None:
        self.shares, self.combed, self.name = config.shares, config.combed, f"slabs{config.shares}"

    def partition(self, members: Sequence[Member], ranks: int) -> Partition:
        """See `intarsia.contracts.Placement`."""
        return Partition(tuple(members), ranks, tuple(self._cut(member) for member in members))

    def _cut(self, member: Member) -> tuple[Region, ...]:
        rows, rest = divmod(member.shape[0], sum(self.shares))
        assert not rest, member
        owners = [rank for rank, share in enumerate(self.shares) for _ in range(share)]
        if self.combed:
            turns = max(self.shares)
            owners = [rank for turn in range(turns) for rank, share in enumerate(self.shares) if turn < share]
        boxes: list[list[Box]] = [[] for _ in self.shares]
        for number, rank in enumerate(owners):
            if boxes[rank] and boxes[rank][-1].end[0] == number * rows:
                last = boxes[rank].pop()
                boxes[rank].append(Box(last.start, (last.size[0] + rows, *last.size[1:])))
            else:
                boxes[rank].append(Box((number * rows, *[0] * (len(member.shape) - 1)), (rows, *member.shape[1:])))
        return tuple(map(tuple, boxes))


class WithForeign:
    """The installed plugins, and placements that are none of them: `chosen` for every config that is not installed, else `Slabs`."""

    def __init__(self, chosen: Any = None) -> None:
        self.chosen = chosen

    def build(self, config: Any, *arguments: Any) -> Any:
        """See `intarsia.plugins.Plugins.build`."""
        if isinstance(config, Slabs):
            return SlabPlacement(config) if self.chosen is None else self.chosen
        return current().build(config, *arguments)


@dataclasses.dataclass
class Made:
    """A sharded module."""

    model: Any
    table: ParameterTable
    sharded: Any
    mesh: Mesh
    world: Communicator

    def gradients(self) -> dict[str, Tensor]:
        """Of the masters."""
        return {name: p.grad for name, p in self.sharded.parameters().items() if p.grad is not None}

    def local(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, flat."""
        layout = self.table[name].layout
        assert layout is not None
        parts = [whole[slices(box)].reshape(-1) for box in layout.local(self.table.rank_in(layout))]
        return torch.cat(parts) if parts else whole.new_empty(0)

    def differences(self, wholes: Mapping[str, Tensor], values: Mapping[str, Tensor] | None = None, rtol: float = 1e-5) -> list[str]:
        """Where this rank's masters (or `values`) are not its parts of the whole tensors."""
        found = []
        for name, value in (self.sharded.masters() if values is None else values).items():
            wanted = self.local(name, wholes[name].detach()).to(value.dtype)
            if not torch.allclose(value.detach().reshape(-1), wanted, rtol=rtol, atol=rtol):
                found.append(f"{name}: {value.flatten()[:3].tolist()} instead of {wanted[:3].tolist()}")
        return found

    def calls(self) -> dict[str, int]:
        """Collectives of the buckets so far."""
        groups = {group for bucket in self.sharded.buckets for group in bucket.groups}
        return {what: each.calls for group in groups for what, each in group.stats().items()}


def shard(
    model: nn.Module,
    world: Communicator,
    *,
    blocks: Sequence[str] = (),
    ties: tuple[tuple[str, ...], ...] = (),
    mesh: Mapping[str, int] | None = None,
    dtypes: tuple[str, str, str] = ("float32", "float32", "float32"),
    seed: int = 3,
    outer: Mapping[str, tuple[tuple[int, ...], Any]] | None = None,
    whole: bool = False,
    plugins: Any = None,
    **settings: Any,
) -> Made:
    """Shard any module whose parameters are drawn at random. `outer` has for a parameter its whole shape and its cuts before data parallelism; `whole` keeps everything
    whole instead."""
    model.regions = lambda: Regions(blocks=tuple(blocks), ties=ties)  # type: ignore[assignment, method-assign]
    model.inits = lambda: {name: Init("normal", std=0.3) for name, _ in model.named_parameters()}  # type: ignore[assignment, method-assign]
    table = ParameterTable.from_model(model, *dtypes, seed=seed)
    for name, (shape, cuts) in (outer or {}).items():
        table[name].shape, table[name].outer = shape, cuts
    places = Mesh(check_mesh(MeshConfig(**(mesh or {})), world.size), world)
    sharder = build_whole(WholeConfig()) if whole else FlexShard(FlexShardConfig(**settings), plugins or WithForeign())
    return Made(model, table, sharder.shard(model, table, places, world), places, world)


class Layer(nn.Module):
    """x + D gelu(U x), with vectors."""

    def __init__(self, dim: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """As wide as it came."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers, each a block, and a head."""

    def __init__(self, layers: int = 2, dim: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim, hidden) for _ in range(layers))
        self.head = nn.Linear(dim, dim)

    @property
    def blocks(self) -> list[str]:
        """Names of the layers."""
        return [f"layers.{index}" for index in range(len(self.layers))]

    def forward(self, x: Tensor) -> Tensor:
        """Through all of them."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def on_meta(make: Any, *arguments: Any, **named: Any) -> Any:
    """A module without values."""
    with torch.device("meta"):
        return make(*arguments, **named)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
