"""The event `moe`: how busy each expert of each layer was in a step, over all ranks.

    {"event": "moe", "step": 100, "layers": {"3": {"load": [0.12, ...], "entropy": 1.98, "dropped": 0.0, "max_violation": 0.31}, ...}}

`load` is each expert's share of the layer's pairs (it sums to 1), `entropy` the mean over tokens of a router's scores (nats), `dropped` the share of pairs that were left out,
`max_violation` the largest load over the mean one, less 1 (arXiv 2408.15664).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from intarsia.contracts import Run

from intarsia_models_common.moe.router import Router


def record_loads(run: Run, step: int) -> None:
    """Write the event where this step is logged. Waits for the device once; where stages of a pipeline have other layers, they are asked for theirs."""
    train = run.recipe.train
    model, mesh = run.parts.get("model"), run.parts.get("mesh")
    if model is None or ((step + 1) % max(1, train.log_every) and step + 1 != train.steps):
        return
    routers = [module for module in model.modules() if isinstance(module, Router) and module.load_E is not None]
    layers = describe([(router.label, router.load_E, router.settings.top_k) for router in routers])  # type: ignore[misc]
    stages = mesh.comm("pp") if mesh is not None and mesh.sizes["pp"] > 1 else None
    if stages is not None:
        layers = {label: facts for each in stages.gather_json(layers, what="load of experts") for label, facts in each.items()}
    if layers:
        run.record("moe", step=step + 1, layers=layers)


def describe(counted: Sequence[tuple[str, torch.Tensor, int]]) -> dict[str, dict[str, Any]]:
    """The event's `layers` from (label, counters, experts of a token), by one copy from the device."""
    if not counted:
        return {}
    values = torch.cat([counters for _, counters, _ in counted]).tolist()
    layers: dict[str, dict[str, Any]] = {}
    for label, counters, top_k in counted:
        mine, values = values[: counters.numel()], values[counters.numel() :]
        *load, tokens, entropy, dropped = mine
        total, tokens = sum(load) or 1.0, tokens or 1.0
        layers[label] = {
            "load": [round(each / total, 6) for each in load],
            "entropy": round(entropy / tokens, 6),
            "dropped": round(dropped / (tokens * top_k), 6),
            "max_violation": round(max(load) * len(load) / total - 1, 6),
        }
    return layers
