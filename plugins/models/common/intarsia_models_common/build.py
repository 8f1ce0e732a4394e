"""How a component comes from its config node: through the registry, so that anybody's component can stand where ours did."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from intarsia import ops, plugins
from intarsia.config import ComponentConfig
from intarsia.contracts import Init
from torch import Tensor, nn

from intarsia_models_common.scaled_linear import scaled_linear


@dataclasses.dataclass(frozen=True)
class Scope:
    """Where in a model a component stands. Stability: provisional.

    `name` is the component's dotted name; `dim` the residual stream's width; `layer` and `layers` its block's number and how many there are;
    `rope_interleaved` the layout of rotated pairs; `std` and `output_std` the deviations for projections into and out of the component;
    `score_factor` what the rotary positions' scaling multiplies scores by, where a mixer heeds it (MLA).
    """

    name: str
    dim: int
    layer: int
    layers: int
    rope_interleaved: bool
    std: float
    output_std: float
    score_factor: float = 1.0

    def inside(self, name: str, dim: int | None = None) -> Scope:
        """The scope of a part called `name`."""
        return dataclasses.replace(self, name=f"{self.name}.{name}" if self.name else name, dim=self.dim if dim is None else dim)


def build(config: ComponentConfig, scope: Scope) -> Any:
    """The component that `config` stands for, built by whoever owns its class: `target(config, scope)`."""
    return plugins.current().build(config, scope)


class Linear(nn.Linear):
    """y = x W^T (+ b), W of shape [outputs, inputs], not filled at construction.

    A sharder that gathers W as float8 may put it beside the parameter, which then only has W's shape and takes its gradient: `weight_payload` [outputs, inputs],
    `weight_scales` and `weight_tile` as in `intarsia_models_common.scaled_linear`.
    """

    # Parameters whose float8 this module reads, as attributes NAME_payload, NAME_scales and NAME_tile.
    reads_payload: ClassVar[tuple[str, ...]] = ("weight",)
    weight_payload: Tensor | None = None
    weight_scales: Tensor | None = None
    weight_tile: tuple[int, int] = (128, 128)

    def __init__(self, inputs: int, outputs: int, std: float, bias: bool = False) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x_NI: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        if self.weight_payload is None or self.weight_scales is None:
            return ops.linear(x_NI, self.weight, self.bias)
        return scaled_linear(x_NI, self.weight, self.weight_payload, self.weight_scales, self.bias, self.weight_tile)

    def reset_parameters(self) -> None:
        """Nothing: the ParameterTable fills parameters from the seed and their name."""

    def inits(self) -> dict[str, Init]:
        """The weight is normal, the bias zero."""
        inits = {"weight": Init("normal", std=self.std)}
        return inits if self.bias is None else {**inits, "bias": Init("zeros")}


def parameter(*shape: int) -> nn.Parameter:
    """A parameter of this shape whose values come later."""
    return nn.Parameter(torch.empty(*shape))
