"""What a bucket sends as float8: payloads, scales and unquantised members in one gather of bytes.

Each rank quantises its shard once after the masters have changed, from the values as they are in the compute dtype, and no tile is cut: what every rank then holds is,
bit for bit, what quantising the whole parameter would give. The masters stay as they are.

Modules that read float8 (`reads_payload`) get views of the gathered bytes, and their parameter becomes a handle that has a shape, takes the gradient and reads as
NaN. Parameters of other modules are dequantised on arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from intarsia.contracts import Box
from intarsia.layout import slices
from torch import Tensor, nn

from intarsia_flexshard.plan import Geometry
from intarsia_flexshard.tiles import FORMAT, best_tiles
from intarsia_flexshard.wire import Item, QuantisedBox, Wire, aligned, plan_arrival

# Where a module keeps a parameter: itself, and the name of the attribute.
Owner = tuple[nn.Module, str]


def reads_payload(owners: Sequence[Owner]) -> bool:
    """Whether everybody who has the parameter reads its float8."""
    return bool(owners) and all(name in getattr(type(module), "reads_payload", ()) for module, name in owners)


class WireViews(NamedTuple):
    """What a kernel needs to write the quantised matrices itself, as `intarsia_flexshard.tiles.quantise_tiles` does: an optimizer's that has the new values at hand."""

    values: Tensor
    wire: Tensor
    boxes: tuple[QuantisedBox, ...]
    tile: tuple[int, int]
    power_of_two: bool
    dtype: torch.dtype


class QuantisedPayload:
    """See `intarsia_flexshard.payload.Payload`.

    Arguments: `layout` made from `geometry`; `index` is this rank; `master` its shard (1-D; on another device than `wire`, it is copied there to be quantised);
    `wire` 1-D uint8 of `layout.counts[index]`, what is sent; `parameters` the model's, in the geometry's order; `owners` for each the modules that read it in their
    forward, empty for a parameter that is also read elsewhere; `dtype` the compute dtype.
    """

    def __init__(
        self,
        layout: Wire,
        geometry: Geometry,
        index: int,
        master: Tensor,
        wire: Tensor,
        parameters: Sequence[nn.Parameter],
        owners: Sequence[Sequence[Owner]],
        dtype: torch.dtype,
        tile: tuple[int, int],
        power_of_two: bool = False,
    ) -> None:
        self.counts, self.dtype, self.layout = layout.counts, torch.uint8, layout
        self._geometry, self._index, self._master, self._wire = geometry, index, master, wire.zero_()
        self._parameters, self._owners, self._compute = list(parameters), [list(each) for each in owners], dtype
        self.reads: list[Tensor] = list(parameters)
        self._tile, self._power_of_two = tile, power_of_two
        self._kernels = best_tiles(wire.device.type)
        self._read = [reads_payload(each) for each in owners]
        self._arrival = plan_arrival(layout, self._read, dtype.itemsize)
        self.whole_bytes, self.staged_bytes = self._arrival.whole, self._arrival.staged
        self._copies: list[tuple[list[Tensor], list[Tensor]]] = []
        self._expansions: list[tuple[Tensor, Tensor, Tensor]] = []
        self._scales: list[Tensor] = []
        self._sent = [self._part(item) for item in layout.items if item.kind == "values"]
        self._views = WireViews(self._master, self._wire, layout.boxes[index], tile, power_of_two, dtype)
        self._stand_in = torch.full((), math.nan, dtype=dtype, device=wire.device)

    # ------------------------------------------------------------ sending

    def wire_views(self) -> WireViews | None:
        """See `Payload.wire_views`. None where the masters are on another device."""
        return self._views if self._master.device == self._wire.device else None

    @torch.no_grad()
    def encode(self) -> None:
        """Quantise this rank's shard."""
        values, wire, *how = self._views
        self._kernels.quantise(values if values.device == wire.device else values.to(wire.device, non_blocking=True), wire, *how)
        self.encode_values()

    @torch.no_grad()
    def encode_values(self) -> None:
        """Bring members that are not quantised to the wire."""
        if self._sent:
            torch._foreach_copy_([target for target, _ in self._sent], [source for _, source in self._sent], non_blocking=True)

    def send(self) -> Tensor:
        """See `Payload.send`."""
        return self._wire

    def _part(self, item: Item) -> tuple[Tensor, Tensor]:
        """This rank's part of an unquantised member on the wire, and in its shard."""
        base, end = sum(self.counts[: self._index]), sum(self.counts[: self._index + 1])
        mine = [piece for piece in item.pieces if base <= piece.offset < end]
        count = sum(piece.box.numel for piece in mine)
        begin = mine[0].offset - base if mine else 0
        offset = self._geometry.offsets[self._index][item.member]
        return self._wire[begin : begin + count * item.width].view(self._compute), self._master[offset : offset + count]

    # ------------------------------------------------------------ receiving

    def bind(self, buffer: Tensor, staging: Tensor) -> None:
        """See `Payload.bind`."""
        total = sum(self.counts)
        self.arrival = buffer[:total] if self._arrival.stays else staging[:total]
        position = total if self._arrival.stays else 0

        def take(size: int) -> Tensor:
            nonlocal position
            position += aligned(size)
            return buffer[position - aligned(size) :][:size]

        wholes = {
            (item.member, item.kind): self.arrival[item.start :][: item.bytes] for item in self.layout.items if item.start is not None
        }
        pairs: list[tuple[Tensor, Tensor]] = []
        for item in self._arrival.copied:
            wholes[item.member, item.kind] = take(item.bytes)
            pairs += _copies(item, wholes[item.member, item.kind], self.arrival)
        self._copies = [([target for target, _ in each], [source for _, source in each]) for each in _by_dtype(pairs)]
        self._expansions, self._scales = [], []
        for item in self.layout.items:
            if item.kind == "values":
                self._parameters[item.member].data = wholes[item.member, "values"].view(self._compute).view(item.shape)
        for member, payload in _matrices(self.layout):
            scales = self.layout.item(member, "scales")
            if self._read[member]:
                self._hand_out(payload, scales, wholes[member, "payload"], wholes[member, "scales"])
            else:
                whole = take(math.prod(payload.shape) * self._compute.itemsize).view(self._compute).view(payload.shape)
                self._parameters[member].data = whole
                for piece, tiles in zip(payload.pieces, scales.pieces, strict=True):
                    values = _typed(self.arrival, piece.offset, piece.box, FORMAT)
                    self._expansions.append(
                        (values, _typed(self.arrival, tiles.offset, tiles.box, torch.float32), whole[slices(piece.box)])
                    )

    def _hand_out(self, payload: Item, scales: Item, payload_bytes: Tensor, scales_bytes: Tensor) -> None:
        """Give views of the bytes to the modules that read them. `.data`: what gathers write later does not count as a change of what autograd has saved."""
        self._parameters[payload.member].data = self._stand_in.expand(payload.shape)
        self._scales.append(scales_bytes.view(torch.float32))
        self.reads[payload.member] = payload_bytes.view(FORMAT).view(payload.shape)
        for module, name in self._owners[payload.member]:
            setattr(module, f"{name}_payload", payload_bytes.view(FORMAT).view(payload.shape).data)
            setattr(module, f"{name}_scales", scales_bytes.view(torch.float32).view(scales.shape).data)
            setattr(module, f"{name}_tile", self._tile)

    @torch.no_grad()
    def decode(self) -> None:
        """See `Payload.decode`."""
        for targets, sources in self._copies:
            torch._foreach_copy_(targets, sources)
        for payload, scales, out in self._expansions:
            self._kernels.dequantise(payload, scales, self._tile, out)

    @torch.no_grad()
    def poison(self) -> None:
        """Make every use of the whole parameters read NaN until they are gathered again."""
        for scales in self._scales:
            scales.fill_(math.nan)
        for parameter, read in zip(self._parameters, self._read, strict=True):
            if not read:
                parameter.data.fill_(math.nan)


def _matrices(layout: Wire) -> list[tuple[int, Item]]:
    return [(item.member, item) for item in layout.items if item.kind == "payload"]


def _typed(arrival: Tensor, offset: int, box: Box, dtype: torch.dtype) -> Tensor:
    return arrival[offset : offset + box.numel * dtype.itemsize].view(dtype).view(box.size)


def _copies(item: Item, whole: Tensor, arrival: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(target, source) for every piece of an item, as bytes or as wider integers where both sides allow."""
    shape = item.shape or (1,)
    target = whole.view(*shape[:-1], shape[-1] * item.width)
    found = []
    for piece in item.pieces:
        start, size = piece.box.start or (0,), piece.box.size or (1,)
        box = Box((*start[:-1], start[-1] * item.width), (*size[:-1], size[-1] * item.width))
        into, source = target[slices(box)], arrival[piece.offset : piece.offset + box.numel].view(box.size)
        if into.is_contiguous():
            into, source = into.flatten(), source.flatten()
        found.append(_widest(into, source))
    return found


def _widest(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    for dtype in (torch.int64, torch.int32):
        sizes = [target.shape[-1], *(number for each in (target, source) for number in (each.data_ptr(), *each.stride()[:-1]))]
        if all(size % dtype.itemsize == 0 for size in sizes):
            return target.view(dtype), source.view(dtype)
    return target, source


def _by_dtype(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Lists of one dtype each, which one launch copies."""
    return [each for dtype in (torch.int64, torch.int32, torch.uint8) if (each := [pair for pair in pairs if pair[0].dtype == dtype])]
