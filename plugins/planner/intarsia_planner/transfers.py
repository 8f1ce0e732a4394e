"""What an optimizer receives from other ranks in a step: it is built over this rank's parts on the meta device, and asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from intarsia.layout import region_numel
from intarsia.plugins import Plugins
from intarsia.train.groups import optimizer_groups
from torch import nn

from intarsia_planner.fake import Message
from intarsia_planner.stage import Stage


def transfers(stage: Stage, plugins: Plugins) -> Mapping[str, list[int]]:
    """Bytes that each rank receives, by the axes over which they come: `transfers` of the optimizer's `facts()`, nothing where it says none. The table's layouts must be the run's."""
    table, parameters = stage.table, {}
    for name in table:
        info = table[name]
        if info.trainable and info.layout is not None:
            numel = region_numel(info.layout.local(table.rank_in(info.layout)))
            parameters[name] = nn.Parameter(torch.empty(numel, dtype=getattr(torch, info.dtype), device="meta"))
    groups = optimizer_groups(stage.recipe.parameter_groups, parameters, parameters)
    optimizer: Any = plugins.build(stage.recipe.optimizer, groups, table, stage.mesh.world)
    facts: Mapping[str, Any] = getattr(optimizer, "facts", dict)()
    return facts.get("transfers", {})  # type: ignore[no-any-return]


def messages(received: Mapping[str, list[int]]) -> list[Message]:
    """The rank of most receives so much: an exchange there, and one back."""
    halves = [(axes, len(sizes), max(sizes)) for axes, sizes in received.items() if max(sizes)]
    return [Message("exchange", axes, ranks, size, "optimizer") for axes, ranks, most in halves for size in (most // 2, most - most // 2)]
