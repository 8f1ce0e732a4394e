"""What an optimizer receives from other ranks and multiplies in a step: it is built over this rank's parts on the meta device, and asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from intarsia.layout import region_numel
from intarsia.plugins import Plugins
from intarsia.train.groups import optimizer_groups
from torch import nn

from intarsia_planner.fake import Message
from intarsia_planner.stage import Stage


@dataclasses.dataclass(frozen=True)
class Asked:
    """What an optimizer says of a step in its `facts()`, by rank, by the axes over which bytes come and matrices are shared out: bytes received, FLOPs of matrix products, and these products' dtype."""

    transfers: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    loads: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    dtype: str = "bfloat16"

    @property
    def load(self) -> float:
        """FLOPs of the rank that has most."""
        return sum(max(each, default=0.0) for each in self.loads.values())


def ask(stage: Stage, plugins: Plugins) -> Asked:
    """What the optimizer says; nothing where it says none. The table's layouts must be the run's."""
    table, parameters = stage.table, {}
    for name in table:
        info = table[name]
        if info.trainable and info.layout is not None:
            numel = region_numel(info.layout.local(table.rank_in(info.layout)))
            parameters[name] = nn.Parameter(torch.empty(numel, dtype=getattr(torch, info.dtype), device="meta"))
    groups = optimizer_groups(stage.recipe.parameter_groups, parameters, parameters)
    optimizer: Any = plugins.build(stage.recipe.optimizer, groups, table, stage.mesh.world)
    facts: Mapping[str, Any] = getattr(optimizer, "facts", dict)()
    return Asked(facts.get("transfers", {}), facts.get("loads", {}), facts.get("load_dtype", "bfloat16"))


def messages(received: Mapping[str, Sequence[int]]) -> list[Message]:
    """The rank of most receives so much: an exchange there, and one back."""
    halves = [(axes, len(sizes), max(sizes)) for axes, sizes in received.items() if max(sizes)]
    return [Message("exchange", axes, ranks, size, "optimizer") for axes, ranks, most in halves for size in (most // 2, most - most // 2)]
