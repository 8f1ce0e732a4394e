"""What generators are compared with: weights that were published, and the same weights in a model that computes whole sequences anew.

Shape suffixes: N tokens, D model width.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import chz
import torch
from intarsia import device as devices
from intarsia import ops
from intarsia.comm import SelfCommunicator
from intarsia.config import Recipe
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterTable
from intarsia.plugins import current
from intarsia_eager.context import TrainContext
from intarsia_rl.contracts import Generator, GeneratorContext, WeightVersion
from intarsia_rl.weights.build import build_model, fill_initial
from intarsia_rl.weights.config import SharedMemoryConfig
from intarsia_rl.weights.shared_memory import SharedMemory
from torch import nn

Result = TypeVar("Result")


def seeded(recipe: Recipe, seed: int) -> Recipe:
    """The recipe whose initial weights are drawn by another seed."""
    return chz.replace(recipe, train=chz.replace(recipe.train, seed=seed))


class Stage:
    """Generators under test, on an event loop of their own, and the weights that they are given: version v is what `seeds[v]` draws.

    `dtype` is what weights are computed with (the recipe's `precision.compute`). Versions go up over all tests of a class, so that one generator serves them all.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: Any,
        make: Callable[[Any, GeneratorContext], Coroutine[Any, Any, Generator]],
        *,
        invariant: bool,
        timeout_s: float,
    ) -> None:
        self._make = make
        self.recipe, self.config, self.invariant, self.timeout_s = recipe, config, invariant, timeout_s
        self.loop = asyncio.new_event_loop()
        self.seeds: dict[int, int] = {0: recipe.train.seed}
        self._version = 0
        self._folder = tempfile.TemporaryDirectory(prefix="intarsia-weights-")
        self._generators: list[Generator] = []
        self._transports: list[SharedMemory] = []
        self._main: Generator | None = None
        self._choices = ops.select(recipe.kernels, current(), devices.capabilities(), recipe.precision.compute, invariant=invariant).choices

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end, bounded in time."""
        return self.loop.run_until_complete(asyncio.wait_for(work, self.timeout_s))

    def close(self) -> None:
        """End all generators and remove what was published."""
        for generator in self._generators:
            self.run(generator.close())
        for transport in self._transports:
            transport.close()
        # What is still under way ends with the loop, not behind it.
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left))
        self.loop.close()
        self._folder.cleanup()

    # ------------------------------------------------------------ generators

    def build(self, initial: bool = False) -> Generator:
        """A fresh generator, without weights unless `initial`."""

        context = GeneratorContext(self.recipe, current(), invariant=self.invariant, initial=initial)
        generator = self.run(self._make(self.config, context))
        self._generators.append(generator)
        return generator

    def main(self) -> Generator:
        """The generator that most tests share; it began with the run's initial weights."""
        if self._main is None:
            self._main = self.build(initial=True)
        return self._main

    def fresh(self, seed: int) -> Generator:
        """Another generator, with the weights of a seed as its first."""
        generator = self.build()
        self.run(generator.update(self.publish(seed)))
        return generator

    # ------------------------------------------------------------ weights

    def publish(self, seed: int) -> WeightVersion:
        """The next version, of the weights that `seed` draws, as a trainer of one process publishes it."""
        plugins, recipe = current(), seeded(self.recipe, seed)
        with torch.device("meta"):
            model: Any = plugins.build(recipe.model)
        kinds = recipe.precision
        table = ParameterTable.from_model(model, kinds.master, kinds.compute, kinds.reduce, seed=seed)
        mesh = Mesh({}, SelfCommunicator())
        sharded = plugins.build(recipe.sharder).shard(model, table, mesh, mesh.world)
        transport = SharedMemory(SharedMemoryConfig(versions=2), self._folder.name)
        self._transports.append(transport)
        self._version += 1
        self.seeds[self._version] = seed
        weights = transport.publish(self._version, {"model": model, "parameters": sharded, "table": table, "mesh": mesh})
        assert weights is not None, "rank 0 publishes"
        return weights

    @functools.lru_cache(maxsize=4)  # noqa: B019  (a stage lives as long as its class of tests)
    def model(self, seed: int) -> nn.Module:
        """The weights of a seed in the model, as it computes."""
        recipe = seeded(self.recipe, seed)
        model = build_model(recipe, current(), "cpu", recipe.precision.compute)
        fill_initial(model, recipe, current())
        return model

    @torch.no_grad()
    def log_probs(self, seed: int, tokens: Sequence[int]) -> list[float]:
        """The log-probability of every token but the first under the weights of a seed, by one pass over the whole sequence, as the trainer computes it."""
        model: Any = self.model(seed)
        with ops.installed(self._choices):
            hidden_ND = self._hidden(model, tokens)[:-1]
            found_N, _ = ops.operators(current())["token_log_probs"](hidden_ND, model.head_weight_VD, torch.tensor(tokens[1:]))
        values: list[float] = found_N.tolist()
        return values

    @torch.no_grad()
    def next_log_probs(self, seed: int, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of all tokens that may follow, [V] float32."""
        model: Any = self.model(seed)
        with ops.installed(self._choices):
            logits_1V = model.project(self._hidden(model, tokens)[None, -1:])[0]
        found: torch.Tensor = logits_1V.float().log_softmax(-1)[0]
        return found

    @torch.no_grad()
    def routes(self, seed: int, tokens: Sequence[int]) -> torch.Tensor:
        """The experts that routers choose for every token, [N, L, K] int16."""
        from intarsia_models_common.moe.replay import recorded_routes

        with ops.installed(self._choices), recorded_routes() as routes:
            self._hidden(self.model(seed), tokens)
        return routes.stacked()

    def _hidden(self, model: Any, tokens: Sequence[int]) -> torch.Tensor:
        context = TrainContext(torch.arange(len(tokens))[None], None, ((len(tokens),),))
        hidden_ND: torch.Tensor = model(torch.tensor([list(tokens)]), context)[0]
        return hidden_ND
