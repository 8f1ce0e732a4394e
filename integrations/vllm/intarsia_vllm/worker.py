"""What the generator asks of vLLM's worker process beyond vLLM's own calls (`worker_extension_cls`); and the experts that routers chose there."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

import torch
from intarsia_models_common.moe.replay import recorded_routes
from torch import Tensor

from intarsia_vllm.backend import PagedMetadata

PARENT = "INTARSIA_VLLM_PARENT"
"""The environment variable by which a generator asks its engine's processes to end with it."""


class WorkerExtension:
    """Methods of the worker, by `collective_rpc`. Arguments and results are plain values."""

    model_runner: Any

    def intarsia_attach(self) -> dict[str, Any]:
        """Let the model know whose tokens it computes. Returns how many blocks of how many tokens the cache has."""
        runner = self.model_runner
        runner.model.attach(runner)
        return {"blocks": runner.kv_cache_config.num_blocks, "block": runner.cache_config.block_size}

    def intarsia_state(self) -> dict[str, Any]:
        """The version that is whole in the model (-1: none), and why the last one is not."""
        model = self.model_runner.model
        return {"version": model.version, "failure": model.failure}

    def intarsia_routes(self, request: str) -> list[Any] | None:
        """Bytes of int16 [tokens, L, K] and their shape, of a request that asked for them; it is forgotten."""
        routes: RouteStore | None = self.model_runner.model.routes
        found = None if routes is None else routes.take(request)
        if found is None:
            return None
        return [found.numpy().astype("<i2").tobytes(), list(found.shape)]


class RouteStore:
    """Choices of a mixture's routers: of every token by its slot in the cache, so that those who share a prefix have them too, and of requests that asked.

    A token's experts are those with which it was computed first; that its caches are made anew under other weights changes nothing.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._kept_PLK: Tensor | None = None
        self._requests: dict[str, list[Tensor]] = {}

    def record(self, metadata: PagedMetadata, recorded: Any) -> None:
        """Note a step's choices."""
        chosen_NLK = recorded.stacked().cpu()
        if self._kept_PLK is None:
            slots = self.runner.kv_cache_config.num_blocks * metadata.block
            self._kept_PLK = chosen_NLK.new_zeros((slots, *chosen_NLK.shape[1:]))
        self._kept_PLK[metadata.slots_T.cpu()] = chosen_NLK
        for number, name in enumerate(self.runner.input_batch.req_ids[: len(metadata.lengths)]):
            asked = self.runner.requests[name].sampling_params.extra_args or {}
            if asked.get("routes"):
                self._extend(name, number, metadata)

    def _extend(self, name: str, number: int, metadata: PagedMetadata) -> None:
        parts = self._requests.setdefault(name, [])
        known, length = sum(map(len, parts)), metadata.lengths[number]
        if known < length:
            positions = torch.arange(known, length)
            blocks = metadata.blocks_RN[number].cpu()[positions // metadata.block].long()
            assert self._kept_PLK is not None
            parts.append(self._kept_PLK[blocks * metadata.block + positions % metadata.block])

    def take(self, request: str) -> Tensor | None:
        """What a request's tokens were routed to; None where it computed none. `request` is the name without the ending that vLLM gives it."""
        names = [name for name in self._requests if name.rpartition("-")[0] == request]
        parts = [self._requests.pop(name) for name in names]
        return torch.cat(parts[-1]) if parts else None


def recording(routes: RouteStore | None) -> Any:
    """A context that records, where there is a store."""
    import contextlib

    return contextlib.nullcontext() if routes is None else recorded_routes()


def end_with_parent() -> None:
    """Have Linux end this process with the one that started it, where that is an engine of a generator of ours: nothing may be left of a generator that was killed."""
    if os.environ.get(PARENT) and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
