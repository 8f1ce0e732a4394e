"""The generator `vllm`: AsyncLLM with our model in it, as `intarsia_rl.contracts.Generator` has it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import intarsia.errors
import torch
from intarsia import device as devices
from intarsia import ops
from intarsia.contracts import Tokenizer
from intarsia.errors import IntarsiaError, NumericsError, PluginError, UsageError
from intarsia.plugins import child_environment
from intarsia_generation.text import IncrementalText
from intarsia_rl.contracts import (
    Finish,
    Generated,
    GeneratorContext,
    GeneratorFacts,
    GeneratorStats,
    ProcessDied,
    Request,
    Routes,
    WeightVersion,
)

from intarsia_vllm import engine as engines
from intarsia_vllm import folder
from intarsia_vllm.config import VllmConfig
from intarsia_vllm.context import specs_of

OnTokens = Callable[[Sequence[int]], None]


def build(config: VllmConfig, context: GeneratorContext) -> VllmGenerator:
    """Start the engine, which takes some twenty seconds. UsageError where vLLM is not installed, and for what it cannot serve."""
    engines.check_installed()
    recipe, plugins = context.recipe, context.plugins
    if context.invariant:
        engines.check_invariant()
    # What the engine's process would refuse is refused here, where it can be said.
    dtype = folder.dtype_of(recipe, config.dtype)
    ops.select(dict(recipe.kernels), plugins, devices.capabilities(), dtype, invariant=context.invariant)
    with torch.device("meta"):
        model: Any = plugins.build(recipe.model)
    specs_of(model)
    mixture = any(hasattr(module, "route_number") for module in model.modules())
    limit = config.max_tokens or recipe.model.max_positions
    home = tempfile.mkdtemp(prefix="intarsia-vllm-")
    try:
        folder.write(home, recipe, plugins, max_tokens=limit, dtype=dtype, invariant=context.invariant, initial=context.initial)
        os.environ.update(child_environment(plugins))
        engine = engines.start(home, config, limit, dtype)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    capabilities = ("forced", *(("routes",) if mixture else ()), *(("invariant",) if context.invariant else ()))
    facts = GeneratorFacts("vllm", recipe.model.vocab_size, limit, config.max_sequences, capabilities)
    return VllmGenerator(engine, facts, plugins.build(recipe.data.tokenizer), home, 0 if context.initial else -1)


@dataclasses.dataclass(eq=False)
class _Live:
    """A request that is being served."""

    request: Request
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    began: float = dataclasses.field(default_factory=time.perf_counter)
    first: float = 0.0
    finish: Finish | None = None


class VllmGenerator:
    """See `Generator`. Made by `build`.

    Tokens are chosen as the embedded generator chooses them (`sampling`). Log-probabilities are vLLM's `raw_logprobs`: log_softmax in float32 of
    the logits as the model gave them. `on_gone` is called when the engine has died.
    """

    on_gone: Callable[[str], None] = staticmethod(engines.end_process)

    def __init__(self, engine: Any, facts: GeneratorFacts, tokenizer: Tokenizer | None, home: str, version: int) -> None:
        self.engine, self.facts, self.tokenizer = engine, facts, tokenizer
        self._home = home
        self._version = version
        self._paused = False
        self._closed = False
        self._changing = asyncio.Lock()
        self._attached: dict[str, Any] | None = None
        self._live: dict[str, _Live] = {}
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._busy_s, self._busy_since = 0.0, 0.0

    # ------------------------------------------------------------ requests

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Generated:
        """See Generator."""
        self._check(request)
        await self._attach()
        live = _Live(request)
        with self._counted(live):
            try:
                await (self._score(live) if request.forced else self._write(live, on_tokens))
                routes = await self._routes(live) if request.routes else None
            except asyncio.CancelledError:
                if request.routes:
                    await asyncio.shield(self._call("intarsia_routes", request.id))
                raise
            except IntarsiaError:
                raise
            except Exception as error:
                raise self._explained(error) from error
        if not all(map(math.isfinite, live.log_probs)):
            raise NumericsError(
                f"The model gives logits that are not finite for request {request.id!r} under weights of version {self._version}: they are not sound."
            )
        finish: Finish = live.finish or "abort"
        now = time.perf_counter()
        return Generated(
            request=request.id,
            tokens=tuple(live.tokens),
            log_probs=tuple(live.log_probs),
            versions=tuple(live.versions),
            finish=finish,
            routes=routes,
            cached_tokens=live.cached,
            first_token_s=live.first,
            seconds_s=now - live.began,
        )

    async def _write(self, live: _Live, on_tokens: OnTokens | None) -> None:
        """Choose tokens. A stop text is found here, for the engine knows no texts: what it has computed beyond is left out."""
        request, stopped = live.request, False
        text = None
        if request.sampling.stop:
            assert self.tokenizer is not None
            text = IncrementalText(self.tokenizer, request.sampling.stop)
        spans: list[Any] = []
        async for output in self._outputs(request, request.tokens, engines.chosen(request)):
            piece = output.outputs[0]
            live.cached = output.num_cached_tokens or live.cached
            spans = piece.weight_versions or spans
            fresh: list[int] = []
            for place, token in enumerate(piece.token_ids):
                if stopped:
                    break
                live.first = live.first or time.perf_counter() - live.began
                live.tokens.append(token)
                live.log_probs.append(piece.logprobs[place][token].logprob)
                fresh.append(token)
                stopped = text is not None and self._stops(text, live)
            if on_tokens is not None and fresh:
                on_tokens(fresh)
            if stopped and piece.finish_reason is None:
                await self.engine.abort(request.id)
            if piece.finish_reason is not None:
                live.finish = "stop" if stopped else engines.finish_of(piece)
        live.versions = engines.versions_of(spans, len(live.tokens))

    def _stops(self, text: IncrementalText, live: _Live) -> bool:
        text.add(live.tokens[-1])
        if text.stopped_by is None and len(live.tokens) == live.request.sampling.max_tokens:
            text.finish()
        return text.stopped_by is not None

    async def _score(self, live: _Live) -> None:
        """Take the forced tokens as a prompt's: vLLM gives the log-probabilities of a prompt's tokens, and one chosen token that nobody wants."""
        request = live.request
        scores: list[Any] = []
        spans: list[Any] = []
        done = False
        async for output in self._outputs(request, (*request.tokens, *request.forced), engines.scored(request)):
            scores = output.prompt_logprobs or scores
            spans = output.outputs[0].weight_versions or spans
            done = done or output.outputs[0].finish_reason == "length"
        if done:
            first = len(request.tokens)
            live.tokens = list(request.forced)
            live.log_probs = [scores[first + place][token].logprob for place, token in enumerate(request.forced)]
            live.versions = engines.versions_of(spans, 1) * len(request.forced)
            live.first = time.perf_counter() - live.began
            live.finish = "length"

    def _outputs(self, request: Request, tokens: Sequence[int], parameters: Any) -> Any:
        return self.engine.generate({"prompt_token_ids": list(tokens)}, parameters, request.id, priority=request.priority)

    async def _routes(self, live: _Live) -> Routes | None:
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
            raise UsageError("The generator is closed.")
        if self._version < 0:
            raise UsageError("The generator has no weights: give it some by `update`, or build it with `initial`.")
        new = len(request.forced) or request.sampling.max_tokens
        wrong = {
            "the prompt has no token": not request.tokens,
            f"{len(request.tokens)} tokens of prompt and {new} further ones exceed generator.max_tokens = {self.facts.max_tokens}": (
                len(request.tokens) + new > self.facts.max_tokens
            ),
            f"max_tokens is {new}; it must be at least 1": new < 1,
            f"there are {len(request.forced)} forced tokens and max_tokens is {request.sampling.max_tokens}, which must be their number": (
                bool(request.forced) and request.sampling.max_tokens != len(request.forced)
            ),
            "it has images, and this model takes none": bool(request.images),
            "it asks for routes, and this model is no mixture of experts": request.routes and "routes" not in self.facts.capabilities,
            "it has stop texts, and there is no tokenizer": bool(request.sampling.stop) and self.tokenizer is None,
            "a request of this id is being served": request.id in self._live,
        }
        bad = [token for token in (*request.tokens, *request.forced) if not 0 <= token < self.facts.vocab_size]
        wrong[f"token {bad[:1]} is not in the vocabulary of {self.facts.vocab_size}"] = bool(bad)
        if found := [text for text, is_wrong in wrong.items() if is_wrong]:
            raise UsageError(f"Request {request.id!r} cannot be served: {'; '.join(found)}.")

    async def abort(self, requests: Sequence[str] | None = None) -> None:
        """See Generator."""
        chosen = [name for name in (self._live if requests is None else requests) if name in self._live]
        if chosen:
            await self.engine.abort(chosen)

    # ------------------------------------------------------------ pause and weights

    async def pause(self, keep: bool = True) -> None:
        """See Generator."""
        async with self._changing:
            await self._stop("keep" if keep else "wait")
            self._paused = True

    async def resume(self) -> None:
        """See Generator."""
        async with self._changing:
            self._paused = False
            if self._version >= 0:
                await self.engine.resume_generation()

    async def update(self, weights: WeightVersion, in_flight: Literal["continue", "drain"] = "continue") -> None:
        """See Generator. All requests stand still while it lasts; those that go on are computed anew from their first token under the new weights."""
        async with self._changing:
            if weights.version == self._version:
                return
            if weights.version < self._version:
                raise UsageError(
                    f"The generator has weights of version {self._version} and was given version {weights.version}: weights never go back. Start another "
                    "generator for older ones."
                )
            await self._attach()
            if not self._paused or in_flight == "drain":
                await self._stop("wait" if in_flight == "drain" and not self._paused else "keep")
            await self._take(weights)
            if not self._paused:
                await self.engine.resume_generation()

    async def _take(self, weights: WeightVersion) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        before, self._version = self._version, -1
        try:
            await self.engine.start_weight_update()
            await self.engine.update_weights(WeightTransferUpdateRequest(update_info=engines.plain_update(weights)))
            state = await self._call("intarsia_state")
            if state["failure"] is None:
                await self.engine.finish_weight_update(str(weights.version))
            else:
                await self.engine.finish_weight_update()
            await self.engine.reset_prefix_cache(reset_running_requests=True)
        except Exception as error:
            raise self._explained(error) from error
        if state["failure"] is not None:
            name, message = state["failure"]
            kind = getattr(intarsia.errors, name, PluginError)
            raise kind(f"{message} The vLLM generator had version {before} and serves nothing until an update succeeds.")
        self._version = weights.version

    async def _stop(self, mode: str) -> None:
        await self.engine.pause_generation(mode=mode, clear_cache=False)

    # ------------------------------------------------------------ how it is

    async def stats(self) -> GeneratorStats:
        """See Generator. `cache_used` counts blocks that several requests share for each of them, and at most 1."""
        if self.engine.errored and not self._closed:
            self.on_gone("it ended")
        started = sum(bool(live.first) for live in self._live.values())
        used = 0.0
        if self._attached is not None:
            block = self._attached["block"]
            tokens = (len(live.request.tokens) + len(live.request.forced) + len(live.tokens) for live in self._live.values())
            used = sum(-(-count // block) for count in tokens) / self._attached["blocks"]
        return GeneratorStats(
            version=self._version,
            running=started,
            waiting=len(self._live) - started,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            cache_used=min(1.0, used),
            busy_s=self._busy_s + (time.perf_counter() - self._busy_since if self._live else 0.0),
            paused=self._paused,
        )

    async def close(self) -> None:
        """See Generator."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self.engine.shutdown)
            shutil.rmtree(self._home, ignore_errors=True)

    @contextlib.contextmanager
    def _counted(self, live: _Live) -> Iterator[None]:
        if not self._live:
            self._busy_since = time.perf_counter()
        self._live[live.request.id] = live
        try:
            yield
        finally:
            del self._live[live.request.id]
            self._prompt_tokens += len(live.request.tokens)
            self._cached_tokens += live.cached
            self._generated_tokens += 0 if live.request.forced else len(live.tokens)
            if not self._live:
                self._busy_s += time.perf_counter() - self._busy_since

    async def _attach(self) -> None:
        if self._attached is None:
            self._attached = await self._call("intarsia_attach")

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return (await self.engine.collective_rpc(method, args=arguments))[0]
        except Exception as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> Exception:
        """What vLLM raises, in our terms: an engine that is gone is a process that died."""
        if isinstance(error, (IntarsiaError, ProcessDied)):
            return error
        if self.engine.errored:
            self.on_gone(f"{type(error).__name__}: {error}")
            return ProcessDied("the vLLM engine", f"{type(error).__name__}: {error}")
        return PluginError(f"vLLM: {type(error).__name__}: {error}")
