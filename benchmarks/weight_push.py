"""Weights of a Llama of 107 M parameters (213 MB in bfloat16, float32 masters) pushed to a generator on a CPU: how long the trainer is held up, and bytes per second, as JSON.

    python benchmarks/weight_push.py [--repeats 5] [--threads 1] [--out FILE]

`publish` is what the trainer waits for: rounding, copying and digests. `copy` is the same rounding and copying alone, into private memory, and `digests` the digests alone.
`fill` is the generator's side: reading, copying, reading back and comparing. Each is the shortest of the repeats, in wall time and in CPU time of this process,
which a busy machine changes least. `first` includes making the memory; `again` is a version that is published already.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chz
import torch
from intarsia.comm import SelfCommunicator
from intarsia.config import PrecisionConfig, Recipe
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterTable
from intarsia.plugins import current
from intarsia_flexshard.config import FlexShardConfig
from intarsia_llama3 import recipes
from intarsia_llama3.config import llama3
from intarsia_rl.weights import digest
from intarsia_rl.weights.build import build_model
from intarsia_rl.weights.config import CollectiveConfig, SharedMemoryConfig, SocketConfig
from intarsia_rl.weights.fill import fill, own_tensors


def made_recipe() -> Recipe:
    """The model, kept as float32 masters that are computed with in bfloat16."""
    model = llama3(dim=1024, layers=8, heads=16, kv_heads=4, head_dim=64, hidden=2816, vocab_size=8192, max_positions=512)
    return chz.replace(recipes.debug(), model=model, sharder=FlexShardConfig(), precision=PrecisionConfig(compute="bfloat16"))


def trainer(recipe: Recipe) -> dict[str, Any]:
    """One rank of a trainer, as far as parameters."""
    with torch.device("meta"):
        model: Any = current().build(recipe.model)
    kinds = recipe.precision
    table, mesh = ParameterTable.from_model(model, kinds.master, kinds.compute, kinds.reduce), Mesh({}, SelfCommunicator())
    sharded = current().build(recipe.sharder).shard(model, table, mesh, mesh.world)
    return {"model": model, "parameters": sharded, "table": table, "mesh": mesh}


def timed(repeats: int, work: Callable[[int], object]) -> dict[str, float]:
    """The shortest wall and CPU time, in milliseconds."""
    walls, cpus = [], []
    for number in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work(number)
        walls.append((time.perf_counter() - wall) * 1e3)
        cpus.append((time.process_time() - cpu) * 1e3)
    return {"wall_ms": round(min(walls), 3), "cpu_ms": round(min(cpus), 3)}


def measure(transport: Any, parts: dict[str, Any], model: Any, repeats: int) -> dict[str, Any]:
    """One transport."""
    result: dict[str, Any] = {"first": timed(1, lambda number: transport.publish(0, parts))}
    transport.publish(1, parts)
    versions: list[Any] = []

    def publish(number: int) -> None:
        versions.append(transport.publish(2 + number, parts))
        transport.retire(number)

    result["publish"] = timed(repeats, publish)
    result["again"] = timed(repeats, lambda number: transport.publish(versions[-1].version, parts))

    def take(number: int) -> None:
        setattr(model, "_filled_weights", (None, None))  # noqa: B010  (as if another version were there)
        fill(model, versions[-1], current())

    result["fill"] = timed(repeats, take)
    transport.close()
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    recipe = made_recipe()
    parts, model = trainer(recipe), build_model(recipe, current(), "cpu", "bfloat16")
    own = own_tensors(model)
    moved = sum(tensor.nbytes for tensor in own.values())
    masters = parts["parameters"].parameters()

    def copy(_: int) -> None:
        for name, master in masters.items():
            own[name].copy_(master.detach())

    def digests(_: int) -> None:
        for tensor in own.values():
            digest.partial(tensor, tensor.shape)

    result: dict[str, Any] = {"bytes": moved, "copy": timed(chosen.repeats, copy), "digests": timed(chosen.repeats, digests)}
    with tempfile.TemporaryDirectory() as folder:
        for config in (SharedMemoryConfig(), SocketConfig(), CollectiveConfig()):
            name = current().entry_of(config).name
            found = measure(current().build(config, folder), parts, model, chosen.repeats)
            for work in ("publish", "fill"):
                found[work]["gb_per_s"] = round(moved / found[work]["wall_ms"] / 1e6, 3)
            result[name] = found
    result |= {"threads": chosen.threads, "torch": torch.__version__, "machine": platform.machine(), "processor": platform.processor()}
    text = json.dumps(result, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
