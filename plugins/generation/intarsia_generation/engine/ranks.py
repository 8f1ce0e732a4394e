"""Several processes as one generator: the first plans and chooses tokens, all compute.

The first rank is the generator's own process. It starts the others (`follower`), tells them of every step and every weights' version before it does the same itself, and waits for nothing but
the collectives of the model. It alone looks at images, since a tower is whole on every rank; their features go to the others with the tokens that they stand for. They share one fate: where one of them ends, or a step fails, so that nobody knows where the others stand, the generator's process ends with the reason, as one that was
killed; who keeps generators starts another one. Each follower ends with the first rank, however that ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from intarsia.comm import Communicator, init_world
from intarsia.errors import UsageError
from intarsia.plugins import Plugins
from intarsia_rl.contracts import GeneratorContext, WeightVersion
from intarsia_rl.processes.child import Child, status_text
from intarsia_rl.processes.local import environment_of
from intarsia_rl.processes.plain import plain_config, plain_recipe
from intarsia_rl.processes.variables import variables
from torch import Tensor, nn

from intarsia_generation.engine.config import LocalConfig
from intarsia_generation.engine.context import Piece
from intarsia_generation.engine.tensor import Parts

BEAT_S = 60.0
"""The first rank says that it lives when it has been idle for so long."""

WAIT_S = 10 * BEAT_S
"""How long a collective waits for the others."""

CLOSE_S = 10.0
"""How long the others may take to end."""

HOST = "127.0.0.1"

FEATURES, SHOWN = "features", "what requests show"

Extra = Mapping[str, Any]
"""What a context is given with tokens: see `sight.Eyes.extra_of`."""


class Team:
    """The ranks of a generator, as its first one has them; the others are in `serve`. `parts` is the first rank's, over the same `world`. Stability: provisional.

    `start` makes it with processes (`children`) for the others. After it all methods but `kill` and `end` are called by one thread.
    """

    beat_s = BEAT_S

    def __init__(self, world: Communicator, parts: Parts, children: _Children | None = None) -> None:
        self.world, self.parts = world, parts
        self._children = children
        self._closed = False
        # By place: the list of blocks that the others know of, and how many of it.
        self._known: dict[int, tuple[list[int], int]] = {}

    @classmethod
    def start(cls, config: LocalConfig, context: GeneratorContext, device: torch.device) -> Team:
        """Start the others and meet them; they build their parts then as this one does. UsageError where this process belongs to a group already."""
        if dist.is_initialized():
            raise UsageError(
                f"generator.tensor = {config.tensor} needs a process of its own, and this one belongs to a process group already. Start it by a process launcher, as runs do."
            )
        store = dist.TCPStore(HOST, 0, config.tensor, is_master=True, wait_for_workers=False)
        children = _Children(config.tensor, store)
        try:
            children.start(config, context)
            with variables(of_rank(0, config.tensor)):
                world = init_world(device, WAIT_S, store=store)
            try:
                return cls(world, Parts(world, config.experts), children)
            except BaseException:
                world.close()
                raise
        except BaseException:
            children.kill()
            raise

    # ------------------------------------------------------------ what all do

    def step(self, calls: Sequence[tuple[Sequence[Piece], Sequence[int], Extra | None]]) -> None:
        """A step begins: calls of the model, each with its pieces, the places of the tokens whose hidden states are wanted, and what a context is given besides."""
        shown = [tensors_of(extra or {}) for _, _, extra in calls]
        told = [
            {
                "pieces": [self._plain(piece) for piece in pieces],
                "places": list(places),
                "extra": {
                    name: [[str(each.dtype).removeprefix("torch."), each.shape] for each in tensors] for name, tensors in named.items()
                },
            }
            for (pieces, places, _), named in zip(calls, shown, strict=True)
        ]
        self._tell({"do": "step", "calls": told}, [tensor for named in shown for tensors in named.values() for tensor in tensors])

    def clear(self) -> None:
        """Caches are cleared."""
        self._tell({"do": "clear"})

    def beat(self) -> None:
        """There is nothing to do."""
        self._tell({"do": "wait"})

    def fill(self, model: nn.Module, weights: WeightVersion, plugins: Plugins) -> None:
        """Put weights into all parts of the model, `model` being this rank's. Raises what the first rank raised that could not."""
        self._tell({"do": "fill", "weights": {each.name: getattr(weights, each.name) for each in dataclasses.fields(weights)}})
        try:
            error = self.parts.fill(model, weights, plugins)
        except BaseException as broken:
            self.end(broken)
        if error is not None:
            raise error

    def _plain(self, piece: Piece) -> list[Any]:
        blocks, known = self._known.get(piece.row, (None, 0))
        is_fresh = blocks is not piece.blocks
        self._known[piece.row] = piece.blocks, len(piece.blocks)
        return [piece.row, piece.start, piece.end, piece.decode, is_fresh, piece.blocks[0 if is_fresh else known :], list(piece.tokens)]

    def _tell(self, message: dict[str, Any], behind: Sequence[Tensor] = ()) -> None:
        try:
            self._send(message)
            for tensor in behind:
                self.world.broadcast(tensor, 0, SHOWN)
        except Exception as error:
            self.end(error)

    def _send(self, message: dict[str, Any]) -> None:
        data = torch.frombuffer(bytearray(json.dumps(message, separators=(",", ":")).encode()), dtype=torch.uint8)
        self.world.broadcast(torch.tensor([data.numel()]), 0, "size of a plan")
        self.world.broadcast(data, 0, "plan")

    # ------------------------------------------------------------ ends

    def end(self, error: BaseException) -> NoReturn:
        """End this process, and with it the others: they may stand elsewhere than this one does."""
        text = "".join(traceback.format_exception(error))
        end_process(f"{text}A generator of {self.world.size} ranks ends where one of them fails: the others stand elsewhere than it does.")

    def close(self) -> None:
        """Send the others home, and leave the group. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._children is not None:
            self._children.expected = True
        with contextlib.suppress(Exception):  # one that died now is no matter
            self._send({"do": "close"})
        if self._children is not None:
            self._children.close()
        self.world.close()

    def kill(self) -> None:
        """End the others at once."""
        if self._children is not None:
            self._children.kill()
        self.world.close()


def hear(world: Communicator) -> dict[str, Any]:
    """What the first rank tells."""
    size = torch.zeros(1, dtype=torch.int64)
    world.broadcast(size, 0, "size of a plan")
    data = torch.empty(int(size), dtype=torch.uint8)
    world.broadcast(data, 0, "plan")
    message: dict[str, Any] = json.loads(data.numpy().tobytes())
    return message


def hear_extra(world: Communicator, told: Mapping[str, Sequence[Any]], device: torch.device) -> Extra | None:
    """What a context is given besides tokens, of whose tensors the first rank told dtypes and shapes."""
    found: dict[str, Any] = {}
    for name, tensors in told.items():
        made = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape in tensors]
        first, *further = (world.broadcast(tensor, 0, SHOWN) for tensor in made)
        found[name] = (first, tuple(further)) if name == FEATURES else first
    return found or None


def tensors_of(extra: Extra) -> dict[str, list[Tensor]]:
    """The tensors of what `Eyes.extra_of` gives, by name: one each, but of features there are several."""
    return {name: [value[0], *value[1]] if name == FEATURES else [value] for name, value in extra.items()}


def end_process(text: str) -> NoReturn:
    """Say why and end, whatever other threads do."""
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


def of_rank(rank: int, size: int) -> dict[str, str]:
    """Variables that say which rank a process is."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}


class _Children:
    """The processes of the ranks from 1 on, which meet at `store`. Until they are `expected` to end, the end of one of them is that of this process."""

    def __init__(self, size: int, store: dist.TCPStore) -> None:
        self.size, self.expected = size, False
        self._store = store
        self._children: list[Child] = []

    def start(self, config: LocalConfig, context: GeneratorContext) -> None:
        """Start them."""
        given = {
            "config": plain_config(config, context.plugins),
            "recipe": plain_recipe(context.recipe, context.plugins),
            "initial": context.initial,
            "index": context.index,
            "port": self._store.port,
        }
        for rank in range(1, self.size):
            command = [sys.executable, "-P", "-X", "faulthandler", "-m", "intarsia_generation.engine.follower"]
            command += [f"generator-{context.index}/{rank}"]
            environment = environment_of(None) | of_rank(rank, self.size)
            child = Child(command, functools.partial(self._ended, rank), env=environment, stdin=subprocess.PIPE)
            self._children.append(child)
            process = child.process
            assert process.stdin is not None, "it is a pipe"
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(given).encode())

    def close(self) -> None:
        """Wait until they have ended; kill those that do not."""
        self.expected = True
        for child in self._children:
            child.join(CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End them, with what they have started."""
        self.expected = True
        for child in self._children:
            child.kill()
        for child in self._children:
            child.join()

    def _ended(self, rank: int, status: int) -> None:
        if not self.expected:
            end_process(f"Rank {rank} of the {self.size} of this generator has ended ({status_text(status)}), and the generator with it.")
