"""Hand-made shards: what a sharder does to parameters, without one. For tests of optimizers, in one process or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from intarsia.contracts import Init, Member
from intarsia.contracts.placement import ALIGNMENT_BYTES
from intarsia.layout import Layout
from intarsia.parameters import ParameterInfo, ParameterTable
from intarsia.plugins import current
from intarsia_placements.layouts import build_layouts
from intarsia_testing.layout import pack, unpack
from torch import Tensor, nn

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.weight": (11, 8),
    "layers.0.wqkv.weight": (12, 8),
    "layers.0.wo.weight": (8, 4),
    "layers.0.up.weight": (16, 8),
    "layers.0.norm.weight": (8,),
    "layers.1.wqkv.weight": (12, 8),
    "layers.1.wo.weight": (8, 4),
    "layers.1.experts.weight": (5, 6, 8),
    "layers.1.norm.weight": (8,),
}


def placement(name: str, **fields: Any) -> Any:
    """An installed placement."""
    plugins = current()
    return plugins.build(plugins.config_class(plugins.registry("placement").find(name))(**fields))


def values(salt: int, shapes: Mapping[str, Sequence[int]] = SHAPES) -> dict[str, Tensor]:
    """Random tensors of the whole shapes, a function of name and salt."""
    made = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(int.from_bytes(name.encode(), "little") % 2**31 + salt)
        made[name] = torch.randn(tuple(shape), generator=generator)
    return made


def layouts_of(steps: Sequence[tuple[str, int, Any]], shapes: Mapping[str, Sequence[int]] = SHAPES) -> dict[str, Layout]:
    """Everything as one bucket under placements."""
    return build_layouts([Member(name, tuple(shape)) for name, shape in shapes.items()], steps)


class Shards:
    """What rank `rank_in(layout)` holds: one flat buffer, aligned members, and gradients laid out likewise (`flat`) or apart.

    With `split` masters are a bfloat16 half that is the parameter and 16 low bits in the table.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout] | None = None,
        mesh: Any = None,
        flat: bool = True,
        split: bool = False,
        shapes: Mapping[str, Sequence[int]] = SHAPES,
        start: Mapping[str, Tensor] | None = None,
        device: str = "cpu",
    ) -> None:
        self.shapes, self.flat, self.split = {name: tuple(shape) for name, shape in shapes.items()}, flat, split
        self.layouts = dict(layouts or {name: Layout.whole(shape) for name, shape in self.shapes.items()})
        self.table = ParameterTable()
        self.table.mesh = mesh
        for name, shape in self.shapes.items():
            self.table.add(ParameterInfo(name, shape, "float32", Init("zeros"), layout=self.layouts[name]))
        self.regions = {name: layout.local(self.table.rank_in(layout)) for name, layout in self.layouts.items()}
        self.numels = {name: sum(box.numel for box in region) for name, region in self.regions.items()}
        unit, self.offsets, end = ALIGNMENT_BYTES // (2 if split else 4), {}, 0
        for name, numel in self.numels.items():
            self.offsets[name] = end
            end += -(-numel // unit) * unit
        self.buffer, self.gradient = (torch.zeros(end, device=device) for _ in range(2))
        start = start or values(0, shapes)
        for name in self.shapes:
            pack(start[name], self.regions[name], self.part(self.buffer, name))
        if split:
            from intarsia.parameters import split_master

            self.high, self.low = (torch.zeros(end, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.int16))
            split_master(self.buffer, self.high, self.low)
        self.parameters = {name: nn.Parameter(self.part(self.high if split else self.buffer, name)) for name in self.shapes}
        for name, parameter in self.parameters.items():
            if split:
                parameter.grad_dtype = torch.float32
                self.table[name].low = self.part(self.low, name)

    def part(self, buffer: Tensor, name: str) -> Tensor:
        """A parameter's elements of a flat buffer."""
        return buffer[self.offsets[name] : self.offsets[name] + self.numels[name]]

    def differentiate(self, step: int, without: Sequence[str] = ()) -> None:
        """Give every parameter its part of the step's gradient, the same function of the name on every rank."""
        whole = values(1000 + step, self.shapes)
        self.gradient = torch.zeros_like(self.gradient)
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if name not in without:
                part = self.part(self.gradient, name) if self.flat else torch.zeros(self.numels[name], device=self.buffer.device)
                pack(whole[name], self.regions[name], part)
                parameter.grad = part

    def masters(self) -> dict[str, Tensor]:
        """Float32 values of the local parts, flat."""
        if not self.split:
            return {name: parameter.detach() for name, parameter in self.parameters.items()}
        from intarsia.parameters import join_master

        return {name: join_master(p.detach(), self.part(self.low, name)) for name, p in self.parameters.items()}

    def whole(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors with this rank's part in place and zeros elsewhere."""
        made = {name: torch.zeros(shape) for name, shape in self.shapes.items()}
        for name, tensor in made.items():
            unpack(local[name].float(), self.regions[name], tensor)
        return made
