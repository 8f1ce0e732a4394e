"""FlexShard over 2 to 4 gloo processes against one plain process, for models and settings of every kind: losses, gradients and parameters of each step."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from _programs import compare, sharder_of
from _spawn import spawn
from intarsia.comm import Communicator

# Relative to the norm of each gradient, in float32.
TOLERANCE = 1e-6

# What is hard to cut: fewer rows than ranks, one element, none, no dimension, three dimensions.
SHAPES = [[3, 7], [1], [5], [0, 3], [], [2, 3, 5], [9, 2]]


# Where sums are taken in another order than the plain process takes them, the error is measured against the norms of what is added up.
LOOSE = {"strict": False}


def chain(*shapes: list[list[int]], **extra: Any) -> dict[str, Any]:
    """Blocks that run one after the other."""
    blocks = [{"shapes": each} for each in shapes]
    return {"dim": 6, "blocks": blocks, "calls": [{"block": number} for number in range(len(blocks))], **extra}


BASE = chain(SHAPES, SHAPES[:4], SHAPES[2:], SHAPES[3:])
PLACEMENTS = [
    "row",
    "row 1",
    "row -1",
    "column",
    "flat 1",
    "flat 64",
    "owned",
    "block 2",
    "block 2x3",
    "block 1x2x3",
    "block -1x-1",
    "replicate",
]
PLACEMENTS += ["mixed row,owned,flat 1,row 1,owned,block 2x3", "odd"]


def calls(*calls: Any, program: dict[str, Any] = BASE, **extra: Any) -> dict[str, Any]:
    """The base's blocks called otherwise; a number is a plain call."""
    return {**program, "calls": [{"block": call} if isinstance(call, int) else call for call in calls], **extra}


def every(how: str, **extra: Any) -> dict[str, Any]:
    """Each block of the base once, all in one way."""
    return calls(*({"block": number, "how": how, **extra} for number in range(4)))


def programs() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """(program, flow) by name."""
    blocks = BASE["blocks"]
    frozen = [{**blocks[0], "frozen": [0, 1, 5]}, {**blocks[1], "frozen": [0, 1, 2, 3]}, *blocks[2:]]
    unused = [blocks[0], {**blocks[1], "unused": [0, 2]}, {**blocks[2], "unused": [0, 1, 2, 3, 4]}, blocks[3]]
    ties = [["blocks.0.p0", "blocks.1.p0"], ["blocks.2.p0", "blocks.0.p2"]]
    towers = calls(0, 1, {"block": 2, "source": 0}, 3)
    conditioned = {"form": "pair", "c": True}
    return {
        "frozen": ({**BASE, "blocks": frozen}, {"micro_batches": 2}),
        "unused": ({**BASE, "blocks": unused}, {"micro_batches": 2}),
        "tied": ({**BASE, "ties": ties, "tied_head": True}, {"micro_batches": 2}),
        "called twice": (calls(0, 1, 0, 2, 3, 3), {"micro_batches": 2}),
        "recomputed outside": (every("checkpoint"), {"micro_batches": 2}),
        "recomputed inside": (every("inside"), {"micro_batches": 2}),
        "recomputed and called twice": (
            calls(*({"block": n, "how": "checkpoint"} for n in (0, 1, 0, 2, 2))),
            {"micro_batches": 2, **LOOSE},
        ),
        "recomputed the old way": (every("reentrant"), {"micro_batches": 2}),
        "accumulation": (BASE, {"micro_batches": 3}),
        "reduced in each micro-batch": (BASE, {"micro_batches": 3, "reduce_always": True}),
        "another order": (calls(2, 0, 3, 1), {}),
        "backwards": (calls(3, 2, 1, 0), {"micro_batches": 2}),
        "skipped": (BASE, {"micro_batches": 3, "skip": [1, 3], "skip_in": [1]}),
        "never called": (calls(0, 2), {"micro_batches": 2}),
        "nested": (calls({"block": 0, "inner": 2}, 1, 3), {"micro_batches": 2}),
        "nested and called": (calls(0, {"block": 1, "inner": 0}, 2, {"block": 3, "inner": 2}), {}),
        "two towers": (towers, {"micro_batches": 2}),
        "four heads on a trunk": (calls(*({"block": n, "source": 0} for n in range(4))), {"micro_batches": 2}),
        "conditioned": (every("plain", **conditioned), {"micro_batches": 2}),
        "conditioned and recomputed": (every("checkpoint", **conditioned), {}),
        "two outputs": (every("plain", form="two"), {}),
        "dict": (every("plain", form="dict"), {}),
        "dataclass": (every("plain", form="dataclass"), {"micro_batches": 2}),
        "no differentiable input": (calls({"block": 0, "how": "detach"}, {"block": 1, "how": "detach"}, 2, 3), {"micro_batches": 2}),
        "input without gradients": ({**BASE, "embedding": False}, {"micro_batches": 2}),
        "a part without gradients": (calls(0, {"block": 1, "how": "no_grad"}, 2, 3), {"micro_batches": 2}),
        "shared module": ({**BASE, "shared": [[2, 0]], "declared": [0, 1, 3]}, {"micro_batches": 2}),
        "shared module with a bucket": ({**BASE, "shared": [[2, 0]], "declared": [0, 1, 2, 3]}, {}),
        "evaluated between steps": (BASE, {"evaluate": "between"}),
        "evaluated within a step": (BASE, {"evaluate": "inside", "micro_batches": 2}),
        "forward without backward": (BASE, {"forward_only": True}),
        "exception": (BASE, {"fail_in": 0, "fail": 1, "micro_batches": 2}),
        "exception in the second micro-batch": (BASE, {"fail_in": 1, "fail": 2, "micro_batches": 2}),
        "backward twice": (BASE, {"backward_twice": True, "micro_batches": 2, "steps": 1, **LOOSE}),
        "update after step": (BASE, {"update": "step"}),
        "update in backward": (BASE, {"update": "in_backward", "micro_batches": 2}),
        "schedule": (BASE, {"drive": "schedule", "micro_batches": 2}),
        "prefetch changes": (BASE, {"depths": [2, 0, 1, 3], "steps": 5}),
        "reshard changes": (BASE, {"reshards": [False, True], "steps": 4, "micro_batches": 2}),
    }


def bucket(name: str, *match: str, **fields: Any) -> dict[str, Any]:
    """A recipe's bucket."""
    return {"name": name, "match": match, **fields}


def settings() -> dict[str, dict[str, Any]]:
    """Settings beside the default ones that the base is trained with, and that are dealt out over programs."""
    spanning = [bucket("matrices", "blocks.*.p0", placement="owned"), bucket("rest", "blocks.*", "norm", placement="flat 1")]
    spanning[1]["match"] = ("blocks.*.p[1-9]", "norm")
    every_one = [bucket(f"{n}.{p}", f"blocks.{n}.p{p}") for n, block in enumerate(BASE["blocks"]) for p in range(len(block["shapes"]))]
    return {
        "never": {"reshard": "never"},
        "after 2": {"reshard": "after 2"},
        "after 3, prefetch 0": {"reshard": "after 3", "prefetch": 0},
        "prefetch 0": {"prefetch": 0},
        "prefetch 2": {"prefetch": 2, "placement": "flat 64"},
        "sharded gradients": {"gradients": "sharded"},
        "offload": {"offload": "cpu", "placement": "flat 1"},
        "debug": {"debug": True, "placement": "owned", "buckets": [bucket("own norm", "norm")]},
        "spanning": {"buckets": spanning},
        "one for each": {"buckets": every_one, "placement": "owned"},
        "one for all": {"buckets": [bucket("all", "*")], "placement": "flat 1"},
        "some kept": {"buckets": [bucket("second", "blocks.1", reshard="never", placement="odd")], "reshard": "after 2"},
        "average": {"reduce_op": "average", "divisor": 1.0},
        "float64": {"dtype": "float64", "placement": "odd"},
    }


def cases(world_size: int) -> list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(name, program, setting, flow)."""
    found: list[Any] = [(kind, BASE, {"placement": kind}, {"micro_batches": 2}) for kind in PLACEMENTS if kind != "replicate"]
    # The order of an all-reduce over copies is the process group's.
    found += [
        ("replicate", BASE, {"placement": "replicate", "dtype": dtype}, {"steps": steps, **LOOSE})
        for dtype, steps in (("float32", 1), ("float64", 3))
    ]
    if world_size == 3:
        found += [
            (name, BASE, setting, {"micro_batches": 3, "strict": name != "sharded gradients"}) for name, setting in settings().items()
        ]
        large = chain([[192]], [[1]])
        large["blocks"][0]["unused"] = [0]
        found.append(("one large parameter without a gradient", large, {"placement": "owned"}, {"micro_batches": 2}))
        gap = {"placement": "mixed row,flat 1", "dtype": "float64", "buckets": [bucket("own", "embedding.weight", "blocks.0.p1")]}
        found.append(("shards that begin with a gap", {**chain([[150], [64]]), "dim": 3}, gap, {"micro_batches": 2}))
    if world_size == 4:
        found = [(name, program, {**setting, "replicate": 2}, {**flow, **LOOSE}) for name, program, setting, flow in found]
    return found


def run(world: Communicator, kind: str) -> list[Any]:
    results = []
    chosen = cases(world.size) if kind == "settings" else [(name, program, {}, flow) for name, (program, flow) in programs().items()]
    if kind == "both":
        dealt = list(settings().values())
        chosen = [(name, program, dealt[number % len(dealt)], {**flow, **LOOSE}) for number, (name, program, _, flow) in enumerate(chosen)]
    for name, program, setting, flow in chosen:
        try:
            result = compare(world, program, setting, {"strict": True, **flow}, sharder_of(setting))
        except Exception:
            # The other ranks fail as well, or wait: nothing after it can be trusted.
            world.gather_json(None, "after an error")
            result = {"worst": float("inf"), "where": traceback.format_exc()[-1500:]}
        results.append([f"{name}: {setting} {flow}", result])
    return results


@pytest.mark.parametrize(
    "ranks, kind", [(2, "programs"), (3, "settings"), (4, "settings"), pytest.param(3, "both", marks=pytest.mark.slow)]
)
def test_n_processes_equal_one(ranks: int, kind: str) -> None:
    results = spawn(run, ranks, kind)[0]
    wrong = [f"{name}: {result['where']}" for name, result in results if not result["worst"] <= TOLERANCE]
    assert not wrong, "\n".join(wrong)
