"""`python -m intarsia_generation.engine.follower NAME ...`: a rank of a generator that is not the first. The first starts it; nobody types it.

What it is to build is JSON on its standard input. Then it does what it is told, until it is told to end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from intarsia_rl.processes import lifeline

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia_rl.contracts import GeneratorContext

    from intarsia_generation.engine.config import LocalConfig

LINGER_S = 30.0


def main() -> int:
    """Meet the others, build, follow."""
    parser = argparse.ArgumentParser(prog="python -m intarsia_generation.engine.follower")
    parser.add_argument("name")
    parser.add_argument("--lifeline", type=int, required=True)
    arguments = parser.parse_args()
    os.environ["INTARSIA_PROCESS"] = arguments.name
    lifeline.hold(arguments.lifeline)
    given = json.loads(sys.stdin.read())
    from intarsia.errors import IntarsiaError

    try:
        follow(given)
    except IntarsiaError:
        # The first rank meets the same, says it to whoever asked, and ends this process; where it does not, it learns of it now.
        traceback.print_exc()
        time.sleep(LINGER_S)
        return 1
    return 0


def follow(given: dict[str, Any]) -> None:
    """Serve as a rank of the generator of `given`."""
    import torch.distributed as dist
    from intarsia.comm import init_world
    from intarsia.plugins import current, verify_child
    from intarsia_rl.contracts import GeneratorContext
    from intarsia_rl.processes.plain import config_of, recipe_of

    from intarsia_generation.engine.build import device_of
    from intarsia_generation.engine.ranks import HOST, WAIT_S

    verify_child()
    plugins = current()
    config = config_of(given["config"], plugins)
    context = GeneratorContext(recipe_of(given["recipe"], plugins), plugins, False, given["initial"], given["index"])
    store = dist.TCPStore(HOST, given["port"], config.tensor, is_master=False, wait_for_workers=False)
    world = init_world(device_of(config, given["index"], int(os.environ["RANK"])), WAIT_S, store=store)
    serve(config, context, world)
    world.close()


def serve(config: LocalConfig, context: GeneratorContext, world: Communicator) -> None:
    """Build this rank's part of a generator, and do what the first rank (`Team`) tells, until it tells to end."""
    import torch
    from intarsia_rl.contracts import WeightVersion

    from intarsia_generation.engine.build import assembled
    from intarsia_generation.engine.ranks import hear, hear_extra
    from intarsia_generation.engine.runner import Runner
    from intarsia_generation.engine.tensor import Parts

    parts = Parts(world, config.experts)
    made = assembled(config, context, parts)
    runner = Runner(made.model, made.device, made.sizes, parts=parts)
    if made.device.type == "cuda":
        torch.cuda.set_device(made.device)
    seats = Seats()
    while True:
        message = hear(world)
        match message["do"]:
            case "step":
                extras = [hear_extra(world, call["extra"], made.device) for call in message["calls"]]
                compute(runner, made.choices, seats, message["calls"], extras)
            case "fill":
                # The first rank tells of what went wrong, here or there.
                parts.fill(made.model, WeightVersion(**message["weights"]), context.plugins)
            case "clear":
                runner.clear()
            case "wait":
                pass
            case "close":
                return


@dataclasses.dataclass(frozen=True)
class Told:
    """A `Piece` of which the first rank told."""

    row: int
    start: int
    end: int
    decode: bool
    blocks: list[int]
    tokens: Sequence[int]


class Seats:
    """The blocks of the requests that run, by place."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[int]] = {}

    def piece(self, row: int, start: int, end: int, decode: bool, is_fresh: bool, new: list[int], tokens: list[int]) -> Told:
        """What `Team` sent, with all blocks of the request."""
        if is_fresh:
            self._blocks[row] = []
        self._blocks[row] += new
        return Told(row, start, end, decode, self._blocks[row], tokens)


def compute(runner: Any, choices: Any, seats: Seats, calls: Sequence[dict[str, Any]], extras: Sequence[Any]) -> None:
    """A step: this rank's part of the model's calls, with what each is given besides tokens, and of the logits, of which the first rank chooses."""
    import torch
    from intarsia import ops

    from intarsia_generation.engine.chosen import ROWS

    with torch.no_grad(), ops.installed(choices):
        hidden = [
            runner.chosen(runner.hidden([seats.piece(*piece) for piece in call["pieces"]], extra), call["places"])
            for call, extra in zip(calls, extras, strict=True)
        ]
        hidden_ND = torch.cat(hidden) if len(hidden) > 1 else hidden[0]
        for first in range(0, hidden_ND.shape[0], ROWS):
            runner.logits(hidden_ND[first : first + ROWS])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a process group may outlive it, and would be in the way of an orderly end.
    os._exit(code)
