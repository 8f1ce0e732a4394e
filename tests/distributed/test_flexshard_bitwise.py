"""What settings of FlexShard leave every bit as it is: placement, memory, order and transport of things are nobody's numbers."""

from __future__ import annotations

from typing import Any

import torch
from _sharded import batches, make, whole_tensors
from _spawn import spawn
from torch import nn

# A power of two: whether a kernel fuses the update's multiplication and addition, which may depend on where in memory an element lies, then changes no bit.
LR = 2.0**-5
HALF: dict[str, Any] = {"compute": "bfloat16"}
# Groups whose members give equal bits; the first of each is what the others are compared with.
EQUAL: dict[str, list[dict[str, Any]]] = {
    "placement, memory and order": [
        {"placement": "row"},
        *({"placement": name} for name in ("column", "flat", "owned", "block", "mixed", "replicate")),
        {"placement": "flat", "reshard": "never"},
        {"placement": "flat", "reshard": "after 3", "prefetch": 3},
        {"placement": "flat", "prefetch": 0},
        {"placement": "row", "offload": "cpu"},
        {"placement": "flat", "early": True},
    ],
    "split masters": [
        {"placement": "row", "master": "split"},
        {"placement": "flat", "master": "split", "offload": "low"},
        {"placement": "owned", "master": "split", "early": True},
    ],
    "accumulation": [{"placement": "row", "micro_batches": 3}, {"placement": "flat", "micro_batches": 3, "reshard": "never"}],
    "float8": [
        {"placement": "flat", "payload": "fp8", "tile": (2, 2)},
        {"placement": "row", "payload": "fp8", "tile": (2, 2), "reshard": "never"},
        {"placement": "owned", "payload": "fp8", "tile": (2, 2), "early": True},
    ],
}


def run(world: Any, settings: dict[str, Any]) -> list[float]:
    """All masters after three steps, and all losses."""
    from _sharded import placements
    from intarsia.plugins import current
    from intarsia.train.groups import optimizer_groups
    from intarsia_flexshard.config import FlexShardConfig
    from intarsia_optimizers.config import SGDConfig

    settings = dict(settings)
    early, micro_batches = settings.pop("early", False), settings.pop("micro_batches", 1)
    config = FlexShardConfig(**{**settings, "placement": placements()[settings["placement"]]})
    model, table, sharded, mesh = make(world, HALF, current().build(config))
    groups = optimizer_groups((), sharded.parameters(), list(table))
    optimizer = current().build(SGDConfig(lr=LR, momentum=0.0), groups, table, world)
    found = []
    for step in range(3):
        for number, (tokens_BS, labels_BS) in enumerate(batches(step, mesh, micro_batches)):
            sharded.set_last_micro_batch(number == micro_batches - 1)
            logits_NV = (model(tokens_BS, True) @ model.head.weight.t()).float().flatten(0, 1)
            loss = nn.functional.cross_entropy(logits_NV, labels_BS.reshape(-1), reduction="sum") / 48
            if early and number == micro_batches - 1:
                with sharded.update_in_backward(optimizer, 1.0):
                    loss.backward()
            else:
                loss.backward()
            found.append(loss.item())
        sharded.finish_gradients()
        sharded.update(optimizer, 1.0)
        sharded.zero_gradients()
    whole = whole_tensors(world, table, dict(sharded.masters()))
    return found + torch.cat([torch.tensor(values).flatten() for values in whole.values()]).tolist()


def compare(world: Any) -> list[str]:
    """Which members of which groups differ."""
    wrong = []
    for name, members in EQUAL.items():
        first, *others = [run(world, settings) for settings in members]
        wrong += [f"{name}: {settings}" for settings, other in zip(members[1:], others, strict=True) if other != first]
    return wrong


def test_bits_do_not_depend_on_where_and_when() -> None:
    assert spawn(compare, 2) == [[]] * 2
