"""Weights over process groups, between processes: two ranks of a trainer, two of a generator that is cut, and another generator that is killed in the middle of a push and started again.

The trainer's ranks hold odd ranges of the kit's small tensors, and rank 1 nothing of some; the generator's hold rows, and one of them nothing of some. Each side is a world of its own. They meet at files.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _spawn import spawn
from intarsia.comm import Communicator
from intarsia.contracts import Box

LONG_S = 300.0


def put(place: Path, value: Any) -> None:
    """Write JSON at once."""
    part = place.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(place)


def awaited(place: Path) -> Any:
    """JSON, when it is there."""
    end = time.monotonic() + LONG_S
    while not place.exists():
        assert time.monotonic() < end, f"{place.name} does not come"
        time.sleep(0.02)
    return json.loads(place.read_text())


# ---------------------------------------------------------------- the trainer


def trainer(world: Communicator, folder: str) -> dict[str, Any]:
    """Publishes two versions; the other generator dies while it takes the first, and takes both when it is started again."""
    from intarsia_rl.weights.collective import Collective
    from intarsia_rl.weights.config import CollectiveConfig
    from intarsia_testing.weight_transport import Trainer

    here, first = Path(folder), world.rank == 0
    transport, trained = Collective(CollectiveConfig(timeout_s=LONG_S, piece_bytes=16), here), Trainer(world)
    found: dict[str, Any] = {"empty": sorted(name for name, master in trained.masters.items() if not master.numel())}

    def publish(step: int) -> None:
        trained.train(step)
        version = transport.publish(step, trained.parts)
        if version is not None:
            put(here / f"version{step}.json", dataclasses.asdict(version))

    publish(0)
    if first:
        found["taken"] = [awaited(here / f"taken0-{rank}.json") for rank in (0, 1)]
        found["killed"] = other_generator(here, "0", "die").returncode
    world.barrier("the other generator is dead")
    publish(1)
    if first:
        again = other_generator(here, "1", "0")
        found["again"] = [again.returncode, again.stdout]
        found["taken"] += [awaited(here / f"taken1-{rank}.json") for rank in (0, 1)]
    world.barrier("all is read")
    end = time.monotonic() + LONG_S
    server: Any = transport._server
    while any(kept.readers for kept in server._kept) and time.monotonic() < end:
        time.sleep(0.02)
    found["readers"] = sum(kept.readers for kept in server._kept)
    transport.close()
    return found


def other_generator(folder: Path, *what: str) -> subprocess.CompletedProcess[str]:
    """Run `take` in a process of its own."""
    environment = {**os.environ, "INTARSIA_PROCESS": "generator-1"}
    command = [sys.executable, __file__, str(folder), *what]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=LONG_S)


# ---------------------------------------------------------------- generators


def take(folder: str, *what: str) -> None:
    """Take whole versions; with `die` in the middle of the transfer that is the third piece's."""
    import torch
    from intarsia.plugins import current
    from intarsia_rl.contracts import WeightVersion
    from intarsia_rl.weights.fill import fill, own_tensors
    from intarsia_rl.weights.pair import Pair
    from intarsia_testing.weight_transport import Small, published

    if "die" in what:
        receive, count = Pair.receive, [0]

        def dies(pair: Pair, tensor: torch.Tensor) -> None:
            count[0] += tensor.numel() > 1
            if count[0] == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            receive(pair, tensor)

        Pair.receive = dies  # type: ignore[method-assign, assignment]
    for step in (int(each) for each in what if each != "die"):
        model = Small().to_empty(device="cpu")
        fill(model, WeightVersion(**awaited(Path(folder, f"version{step}.json"))), current())
        assert all(torch.equal(tensor, published(step)[name]) for name, tensor in own_tensors(model).items())
        print(step)


def region(shape: tuple[int, ...], low: int, high: int) -> tuple[Box, ...]:
    """Some rows."""
    return (Box((low, *[0] * (len(shape) - 1)), (high - low, *shape[1:])),)


def generator(world: Communicator, folder: str) -> list[int]:
    """Two ranks that hold rows take both versions, the second after the other generator has died; how many groups each has made until then."""
    import torch
    from intarsia.layout import Layout, slices, whole_region
    from intarsia.plugins import current
    from intarsia_rl.contracts import WeightVersion
    from intarsia_rl.weights import collective
    from intarsia_rl.weights.fill import fill, filled_version, held_parts
    from intarsia_rl.weights.pair import Pair
    from intarsia_testing.weight_transport import published
    from torch import nn

    made: list[int] = []

    def pair(*arguments: Any) -> Pair:
        made.append(1)
        return Pair(*arguments)

    collective.Pair = pair  # type: ignore[assignment, misc]
    layouts = {}
    for name, whole in published(0).items():
        shape, half = tuple(whole.shape), -(-len(whole) // 2) if whole.ndim else 0
        # Rows, an odd one first; what has fewer than three is the first rank's.
        regions = [region(shape, 0, half), region(shape, half, len(whole))] if half > 1 else [whole_region(shape), ()]
        layouts[name] = Layout.whole(shape).cut("tp", regions)
    holds = held_parts(layouts, world.rank)
    model, values = nn.Module(), published(0)
    for name, parts in holds.items():
        shape = parts[0].box.size if parts and parts[0].box is not None else (0,)
        model.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=values[name].dtype), requires_grad=False))
    combine = functools.partial(world.all_reduce, op="sum", what="digests")
    for step in (0, 1):
        version = WeightVersion(**awaited(Path(folder, f"version{step}.json")))
        fill(model, version, current(), holds, combine)
        for name, parts in holds.items():
            for part in parts:
                assert part.box is not None and torch.equal(getattr(model, name), published(step)[name][slices(part.box)]), name
        put(Path(folder, f"taken{step}-{world.rank}.json"), filled_version(model))
    return made


def test_a_generator_that_dies_takes_its_own_group_with_it(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        trainers = pool.submit(spawn, trainer, 2, str(tmp_path))
        generators = pool.submit(spawn, generator, 2, str(tmp_path))
        (first, second), made = trainers.result(), generators.result()
    assert first["killed"] == -signal.SIGKILL
    assert first["again"] == [0, "1\n0\n"]
    assert first["taken"] == [0, 0, 1, 1]
    assert first["readers"] == second["readers"] == 0
    assert second["empty"] == ["nothing", "scalar"] and first["empty"] == ["nothing"]
    assert made == [[1, 1], [1, 1]]


if __name__ == "__main__":
    take(*sys.argv[1:])
