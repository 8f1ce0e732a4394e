"""Weights of trainers of several processes, through every transport: version 0 is what a generator draws, the next one what the trainer computes with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _spawn import spawn
from intarsia.comm import Communicator

BF16 = "precision.compute=bfloat16"


def work(world: Communicator, folder: str, name: str, overrides: list[str]) -> dict[str, Any]:
    """Publishes twice by each transport, and fills a generator's model on rank 0."""
    from _weights import build, change, gathered, recipe_of
    from intarsia import plugins
    from intarsia_rl.weights.build import build_model, fill_initial
    from intarsia_rl.weights.config import CollectiveConfig, SharedMemoryConfig, SocketConfig
    from intarsia_rl.weights.fill import fill, own_tensors

    resolved, loaded = recipe_of(name, *overrides), plugins.current()
    recipe = resolved.recipe
    run = build(resolved, world)
    drawn, taken = (build_model(recipe, loaded, "cpu", recipe.precision.compute) for _ in range(2))
    fill_initial(drawn, recipe, loaded)
    transports = [
        loaded.build(config, folder) for config in (SharedMemoryConfig(folder=folder), SocketConfig(), CollectiveConfig(timeout_s=300.0))
    ]
    found: dict[str, Any] = {"digests": []}
    for transport in transports:
        version = transport.publish(0, run.parts)
        if version is not None:
            fill(taken, version, loaded)
            wrong = [key for key, value in own_tensors(drawn).items() if not torch.equal(own_tensors(taken)[key], value)]
            found["drawn"] = found.get("drawn", []) + wrong
        world.barrier("read")
    change(run, 1)
    computed = gathered(run)
    for transport in transports:
        version = transport.publish(1, run.parts)
        assert transport.publish(1, run.parts) == version
        if version is not None:
            fill(taken, version, loaded)
            wrong = [key for key, value in computed.items() if not torch.equal(own_tensors(taken)[key], value)]
            found["computed"] = found.get("computed", []) + wrong
            found["digests"].append(dict(version.digests))
        world.barrier("read")
        transport.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "name", "overrides"),
    [
        (2, "deepseek_v3/debug", [BF16]),
        (4, "deepseek_v3/debug", [BF16, "sharder.master=split", "mesh.tp=2", "mesh.ep=2"]),
    ],
    ids=["fsdp", "tensor and expert parallel"],
)  # fmt: skip
def test_processes(tmp_path: Any, ranks: int, name: str, overrides: list[str]) -> None:
    first, *others = spawn(work, ranks, str(tmp_path), name, overrides)
    assert first["drawn"] == [] and first["computed"] == []
    one, *rest = first["digests"]
    assert rest == [one, one] and len(one) > 30
    assert all(other == {"digests": []} for other in others)
