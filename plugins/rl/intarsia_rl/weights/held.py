"""What a trainer's rank has of the weights that are published: the boxes of which it has the primary copy, in the dtype in which the trainer computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.contracts import Box
from intarsia.errors import PluginError
from intarsia.layout import whole_region
from intarsia.mesh import Mesh, copies_along
from intarsia.parameters import ParameterTable, persistent_buffers
from torch import Tensor, nn

from intarsia_rl.weights import digest


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """A tensor that is published: its shape and its dtype's name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor with its values: of the box's shape, on the trainer's device, in the master's dtype."""

    name: str
    box: Box
    values: Tensor


class Held:
    """The parts of a run, seen as what is published. `described` is equal on all ranks: of each pipeline stage the parameters by canonical name, then the persistent buffers.

    Built by `Held(parts)` where `parts` are `Run.parts`: `model`, `parameters` (the ShardedModel), `table`, `mesh`. A collective.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        missing = [name for name in ("model", "parameters", "table", "mesh") if name not in parts]
        if missing:
            raise PluginError(f"Weights cannot be published from a run without {', '.join(missing)}: publish when the run has been built.")
        self._model: nn.Module = parts["model"]
        self._sharded, self._table = parts["parameters"], parts["table"]
        self.mesh: Mesh = parts["mesh"]
        self.world: Communicator = self.mesh.world
        self._regions = {name: self._primary(name) for name in self._sharded.parameters()}
        self.described = self._describe()
        self._order = {name: number for number, name in enumerate(self.described)}

    def _describe(self) -> dict[str, Described]:
        """The tensors of all pipeline stages."""
        here: list[list[Any]] = []
        if self.mesh.stage.rank == 0:
            dtypes = compute_dtypes(self._model, self._table)
            here = [[name, list(info.shape), dtypes[name]] for name, info in self._table.items() if not info.is_copy]
            for name, buffer in persistent_buffers(self._model).items():
                here.append([name, list(buffer.shape), str(buffer.dtype).removeprefix("torch.")])
        everywhere = self.world.gather_json(here, what="tensors that are published")
        self._buffer_owner: dict[str, int] = {}
        found: dict[str, Described] = {}
        for rank, stage in enumerate(everywhere):
            for name, shape, dtype in stage:
                self._buffer_owner.setdefault(name, rank)
                found.setdefault(name, Described(tuple(shape), dtype))
        return found

    def _primary(self, name: str) -> tuple[Box, ...]:
        """The boxes of a parameter that this rank publishes, which are all that it stores of it or none."""
        info, coordinates = self._table[name], self.mesh.coordinates
        layout = info.layout
        if layout is None:
            raise PluginError(f"Parameter {name!r} has no layout yet: the sharder has not run.")
        if info.is_copy or any(coordinates[axis] for axis in copies_along(axis for axis, _ in layout.axes)):
            return ()
        rank = self._table.rank_in(layout)
        return layout.local(rank) if layout.primary(rank) == layout.local(rank) else layout.primary(rank)

    def boxes(self) -> dict[str, tuple[Box, ...]]:
        """By name the boxes that this rank publishes."""
        found = {name: region for name, region in self._regions.items() if region}
        for name, buffer in persistent_buffers(self._model).items():
            if self._buffer_owner[name] == self.world.rank:
                found[name] = whole_region(buffer.shape)
        return found

    def pieces(self) -> Iterator[Piece]:
        """Every box of `boxes` with what it holds now: the trainer's live storage.

        A split master is published by its high half, which is what its cast to bfloat16 gives and what is gathered.
        """
        for name, parameter in self._sharded.parameters().items():
            flat, offset = parameter.detach().reshape(-1), 0
            for box in self._regions[name]:
                yield Piece(name, box, flat[offset : offset + box.numel].view(box.size))
                offset += box.numel
        for name, buffer in persistent_buffers(self._model).items():
            if self._buffer_owner[name] == self.world.rank and buffer.numel():
                yield Piece(name, Box.whole(buffer.shape), buffer.detach())

    @torch.no_grad()
    def copy_into(self, target: Callable[[Piece], Tensor]) -> Tensor:
        """Copy every piece, cast, into what `target` gives for it: a tensor of the box's shape, on the CPU or the device, which is read after this returns. Returns the digests' sums over this rank's
        boxes, int64 [tensors, 2], in the order of `described`."""
        sums = torch.zeros(len(self.described), 2, dtype=torch.int64, device=self.mesh.device)
        for piece in self.pieces():
            one = self.described[piece.name]
            values = piece.values.to(one.torch_dtype)
            # Where the target is pinned the device copies on its own, one after the other; they are waited for once.
            target(piece).copy_(values, non_blocking=True)
            sums[self._order[piece.name]] += digest.partial(values, one.shape, piece.box).to(sums.device)
        if self.mesh.device.type == "cuda":
            # This stream alone: others may wait for a reader that is gone.
            torch.cuda.current_stream(self.mesh.device).synchronize()
        return sums

    def digests(self, sums: Tensor) -> dict[str, str]:
        """The digests of all tensors from what `copy_into` gave. A collective, at whose end every rank has got here."""
        total = self.world.all_reduce(sums, "sum", "digests of weights").tolist()
        return {name: digest.text(pair, one.dtype, one.shape) for (name, one), pair in zip(self.described.items(), total, strict=True)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name the shape."""
        return {name: one.shape for name, one in self.described.items()}

    def dtypes(self) -> dict[str, str]:
        """By name the dtype's name."""
        return {name: one.dtype for name, one in self.described.items()}


def compute_dtypes(model: nn.Module, table: ParameterTable) -> dict[str, str]:
    """By canonical name the dtype in which a sharded model computes with a parameter: that of the model's own parameter, whatever its master's is."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: str(named[info.names[0]].dtype).removeprefix("torch.") for name, info in table.items()}
