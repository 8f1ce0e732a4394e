"""The service of a generator's process: builds the generator of a config, and passes calls on to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from intarsia.errors import PluginError
from intarsia.plugins import current

from intarsia_rl.contracts import Generated, Generator, GeneratorContext, GeneratorFacts, GeneratorStats, Request, WeightVersion
from intarsia_rl.processes.plain import config_of, recipe_of


async def serve(config: Mapping[str, Any], recipe: Mapping[str, Any], invariant: bool, initial: bool, index: int) -> GeneratorService:
    """Build the generator. `config` and `recipe` are as `plain` makes them."""
    plugins = current()
    context = GeneratorContext(recipe_of(recipe, plugins), plugins, invariant, initial, index)
    settings = config_of(config, plugins)
    generator = plugins.build(settings, context)
    if not isinstance(generator, Generator):
        entry = plugins.entry_of(settings)
        raise PluginError(
            f"generator {entry.full_name!r} builds a {type(generator).__name__}, which lacks a method of `intarsia_rl.contracts.Generator`."
        )
    return GeneratorService(generator)


class GeneratorService:
    """The methods of a Generator, for calls from another process."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._send: Callable[[str, Any], None] | None = None

    def connected(self, send: Callable[[str, Any], None]) -> None:
        """Take the way to tell of tokens."""
        self._send = send

    async def facts(self) -> GeneratorFacts:
        """The generator's."""
        return self._generator.facts

    async def generate(self, request: Request, tell: bool) -> Generated:
        """The completion. `tell`: send a message `tokens` (request, tokens) as they come."""
        send = self._send
        if not tell or send is None:
            return await self._generator.generate(request)
        return await self._generator.generate(request, lambda tokens: send("tokens", (request.id, tuple(tokens))))

    async def abort(self, requests: Sequence[str] | None) -> None:
        """See Generator."""
        await self._generator.abort(requests)

    async def pause(self, keep: bool) -> None:
        """See Generator."""
        await self._generator.pause(keep)

    async def resume(self) -> None:
        """See Generator."""
        await self._generator.resume()

    async def update(self, weights: WeightVersion, in_flight: Literal["continue", "drain"]) -> None:
        """See Generator."""
        await self._generator.update(weights, in_flight)

    async def stats(self) -> GeneratorStats:
        """See Generator."""
        return await self._generator.stats()

    async def close(self) -> None:
        """See Generator."""
        await self._generator.close()
