"""The generator `vllm`: AsyncLLM with our model in it, as `intarsia_rl.contracts.Generator` has it."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Literal

import intarsia.errors
import torch
from intarsia import device as devices
from intarsia import ops
from intarsia.config import Recipe
from intarsia.contracts import Tokenizer
from intarsia.errors import IntarsiaError, NumericsError, PluginError, UsageError
from intarsia.plugins import Plugins, child_environment
from intarsia_generation.engine.generator import check
from intarsia_generation.engine.routes import has_routers
from intarsia_generation.text import IncrementalText
from intarsia_rl.contracts import Generated, GeneratorContext, GeneratorFacts, GeneratorStats, ProcessDied, Request, Routes, WeightVersion
from torch import nn

from intarsia_vllm import engine as engines
from intarsia_vllm import folder
from intarsia_vllm.admission import Admission, Live, OnTokens
from intarsia_vllm.config import VllmConfig
from intarsia_vllm.context import specs_of

PAUSE, DRAIN, NO_WEIGHTS = "pause", "drain", "no weights"
"""Why no request is begun."""


def build(config: VllmConfig, context: GeneratorContext) -> VllmGenerator:
    """Start the engine, which takes some twenty seconds. UsageError for what vLLM cannot serve, and where it is not installed."""
    recipe, plugins = context.recipe, context.plugins
    model = served(recipe, plugins)
    engines.check_installed()
    if context.invariant:
        engines.check_invariant()
    # What the engine's process would refuse is refused here, where it can be said.
    dtype = folder.dtype_of(recipe, config.dtype)
    ops.select(dict(recipe.kernels), plugins, devices.capabilities(), dtype, invariant=context.invariant)
    limit = config.max_tokens or recipe.model.max_positions
    # The engine reads the folder while it starts and never again.
    with tempfile.TemporaryDirectory(prefix="intarsia-vllm-") as home:
        folder.write(home, recipe, plugins, max_tokens=limit, dtype=dtype, invariant=context.invariant, initial=context.initial)
        os.environ.update(child_environment(plugins))
        engine = engines.start(home, config, limit, dtype)
    capabilities = ("forced", *(("routes",) if has_routers(model) else ()), *(("invariant",) if context.invariant else ()))
    facts = GeneratorFacts("vllm", recipe.model.vocab_size, limit, config.max_sequences, capabilities)
    return VllmGenerator(engine, facts, functools.partial(plugins.build, recipe.data.tokenizer), 0 if context.initial else -1)


def served(recipe: Recipe, plugins: Plugins) -> nn.Module:
    """The model of a recipe, without storage. UsageError where vLLM cannot serve the run, whether vLLM is there or not: media, and mixers whose caches it has no place for."""
    processor = getattr(recipe.data.loader, "processor", None)
    if processor is not None:
        raise UsageError(
            f"The generator `vllm` serves text alone, and the run shows images or video: data.loader.processor={plugins.entry_of(processor).name}. Take the embedded generator "
            "(data.loader.generator=local), or set data.loader.processor=none where the environment shows none."
        )
    with torch.device("meta"):
        model: nn.Module = plugins.build(recipe.model)
    specs_of(model)
    return model


class VllmGenerator:
    """See `Generator`. Made by `build`.

    Tokens are chosen as the embedded generator chooses them (`sampling`). Log-probabilities are vLLM's `raw_logprobs`: log_softmax in float32 of
    the logits as the model gave them. Without weights requests wait. `on_gone` is called when the engine has died.
    """

    on_gone: Callable[[str], None] = staticmethod(engines.end_process)

    def __init__(self, engine: Any, facts: GeneratorFacts, make_tokenizer: Callable[[], Tokenizer], version: int) -> None:
        self.engine, self.facts = engine, facts
        self._make_tokenizer, self._version = make_tokenizer, version
        self._requests = Admission(facts.max_sequences)
        if version < 0:
            self._requests.hold(NO_WEIGHTS)
        self._paused = self._closed = False
        self._updates, self._changes = asyncio.Lock(), asyncio.Lock()
        self._cache: dict[str, int] | None = None
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0

    # ------------------------------------------------------------ requests

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Generated:
        """See Generator. A stop text is found here, for the engine knows no texts: what it has computed beyond is left out."""
        self._check(request)
        text = IncrementalText(self._make_tokenizer(), request.sampling.stop) if request.sampling.stop else None
        live, routes = Live(request, on_tokens), None
        async with self._requests.place(live):
            if self._requests.is_running(live):
                try:
                    await self._attach()
                    await self._run(live, text)
                    if request.routes:
                        routes = await self._routes(live)
                except asyncio.CancelledError:
                    if request.routes and not self._closed:
                        await asyncio.shield(self._call("intarsia_routes", request.id))
                    raise
                except Exception as error:
                    if not self._closed:
                        raise self._explained(error) from error
        self._prompt_tokens += len(request.tokens)
        self._cached_tokens += live.cached
        self._generated_tokens += max(0, len(live.tokens) - len(request.forced))
        if not all(map(math.isfinite, live.log_probs)):
            raise NumericsError(
                f"The model gives logits that are not finite for request {request.id!r} under weights of version {live.versions[-1]}: they are not sound."
            )
        return live.result(routes)

    async def _run(self, live: Live, text: IncrementalText | None) -> None:
        """Forced tokens are given to vLLM as the end of the prompt, of whose tokens it gives log-probabilities as well."""
        request = live.request
        spans: list[Any] = []
        stopped = False
        if live.finish == "abort":
            return
        prompt = {"prompt_token_ids": [*request.tokens, *request.forced]}
        async for output in self.engine.generate(prompt, engines.parameters(request), request.id, priority=request.priority):
            piece = output.outputs[0]
            live.cached = output.num_cached_tokens or live.cached
            spans = piece.weight_versions or spans
            if request.forced and not live.tokens and piece.token_ids:
                live.take(request.forced, engines.forced_log_probs(request, output.prompt_logprobs))
            new: list[int] = []
            for token in piece.token_ids:
                if stopped or len(live.tokens) + len(new) == request.sampling.max_tokens:
                    break
                new.append(token)
                stopped = text is not None and text.stops(token, len(live.tokens) + len(new) == request.sampling.max_tokens)
            live.take(new, [piece.logprobs[place][token].logprob for place, token in enumerate(new)])
            if piece.finish_reason is not None:
                live.finish = "stop" if stopped else engines.finish_of(piece, live)
            elif stopped or live.finish == "abort":
                await self.engine.abort(request.id)
        forced = min(len(request.forced), len(live.tokens))
        versions = engines.versions_of(spans, max(1, len(live.tokens) - forced))
        live.versions = [*[versions[0]] * forced, *versions][: len(live.tokens)]

    async def _routes(self, live: Live) -> Routes | None:
        """Of prompt and generated tokens but the last."""
        found = await self._call("intarsia_routes", live.request.id)
        rows = len(live.request.tokens) + len(live.tokens) - 1
        if found is None or not live.tokens:
            return None
        data, (tokens, layers, k) = found
        if tokens < rows:
            raise PluginError(f"vLLM computed {tokens} tokens of request {live.request.id!r}, of which {rows} have routes to report.")
        return Routes(bytes(data)[: rows * layers * k * 2], (rows, layers, k))

    def _check(self, request: Request) -> None:
        """UsageError for what can never be served."""
        if self._closed:
            raise UsageError(f"Request {request.id!r}: the generator is closed.")
        check(request, self.facts, self._requests.all)

    async def abort(self, requests: Sequence[str] | None = None) -> None:
        """See Generator."""
        chosen = [live for live in self._requests if requests is None or live.request.id in requests]
        begun = [live.request.id for live in chosen if self._requests.is_running(live)]
        for live in chosen:
            live.finish = "abort"  # it may be on its way to vLLM, which does not know it yet
            live.admitted.set()
        if begun:
            await self.engine.abort(begun)

    # ------------------------------------------------------------ pause and weights

    async def pause(self, keep: bool = True) -> None:
        """See Generator."""
        self._requests.hold(PAUSE)
        if not keep:
            await self._requests.until(lambda: not self._requests.running)
        async with self._changes:
            self._paused = True
            await self._stop()

    async def resume(self) -> None:
        """See Generator."""
        async with self._changes:
            self._paused = False
            await self._go_on()
        self._requests.release(PAUSE)
        self._requests.moved()

    async def update(self, weights: WeightVersion, in_flight: Literal["continue", "drain"] = "continue") -> None:
        """See Generator. All requests stand still while it lasts; those that go on are computed anew from their first token under the new weights. `drain` while paused waits for `resume`.
        A failed update leaves no weights in force: requests wait for the next one."""
        if in_flight not in ("continue", "drain"):
            raise UsageError(f"in_flight is {in_flight!r}; it must be continue or drain.")
        async with self._updates:
            if weights.version == self._version:
                return
            if weights.version < self._version:
                raise UsageError(
                    f"The generator has weights of version {self._version} and was given version {weights.version}: weights never go back. Start another "
                    "generator for older ones."
                )
            await self._attach()
            if in_flight == "drain" and self._version >= 0:
                self._requests.hold(DRAIN)
            try:
                if in_flight == "drain" and self._version >= 0:
                    await self._requests.until(lambda: not self._requests.running and not self._paused)
                async with self._changes:
                    await self._stop()
                    await self._take(weights)
                    if not self._paused:
                        await self._go_on()
            finally:
                self._requests.release(DRAIN)
            self._requests.release(NO_WEIGHTS)

    async def _take(self, weights: WeightVersion) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._requests.hold(NO_WEIGHTS)
        before, self._version = self._version, -1
        try:
            await self.engine.start_weight_update()
            await self.engine.update_weights(WeightTransferUpdateRequest(update_info=engines.plain_update(weights)))
            state = await self._call("intarsia_state")
            await self.engine.finish_weight_update(None if state["failure"] else str(weights.version))
            await self.engine.reset_prefix_cache(reset_running_requests=True)
        except Exception as error:
            raise self._explained(error) from error
        if state["failure"] is not None:
            name, message = state["failure"]
            kind = getattr(intarsia.errors, name, PluginError)
            raise kind(f"{message} The vLLM generator had version {before}; it serves nothing until an update succeeds.")
        self._version = weights.version

    async def _stop(self) -> None:
        """Between two steps of the engine. Nothing that it keeps is lost."""
        await self.engine.pause_generation(mode="keep", clear_cache=False)

    async def _go_on(self) -> None:
        if self._version >= 0:
            await self.engine.resume_generation()

    # ------------------------------------------------------------ how it is

    async def stats(self) -> GeneratorStats:
        """See Generator. `cache_used` counts blocks that several requests share for each of them, and at most 1."""
        if not self._closed and self.engine.errored:
            self.on_gone("it ended")
        used = 0.0
        if self._cache is not None:
            size = self._cache["block"]
            running = (live for live in self._requests if self._requests.is_running(live))
            tokens = (len(live.request.tokens) + max(len(live.request.forced), len(live.tokens)) for live in running)
            used = sum(-(-count // size) for count in tokens) / self._cache["blocks"]
        return GeneratorStats(
            version=self._version,
            running=len(self._requests.running),
            waiting=self._requests.waiting,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            cache_used=min(1.0, used),
            busy_s=self._requests.busy(),
            paused=self._paused,
        )

    async def close(self) -> None:
        """See Generator."""
        if self._closed:
            return
        await self.abort()
        self._closed = True
        engine, self.engine = self.engine, None
        await asyncio.to_thread(engine.shutdown, 1.0)
        # vLLM shuts down once more where the object is collected, which may be when the interpreter's modules are gone.
        engine.shutdown = lambda *arguments, **named: None

    async def _attach(self) -> None:
        if self._cache is None:
            self._cache = await self._call("intarsia_attach")

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return (await self.engine.collective_rpc(method, args=arguments))[0]
        except Exception as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> Exception:
        """What vLLM raises, in our terms: an engine that is gone is a process that died."""
        if isinstance(error, (IntarsiaError, ProcessDied)):
            return error
        if self.engine is not None and self.engine.errored:
            self.on_gone(f"{type(error).__name__}: {error}")
            return ProcessDied("the vLLM engine", f"{type(error).__name__}: {error}")
        return PluginError(f"vLLM: {type(error).__name__}: {error}")
