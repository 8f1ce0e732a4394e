"""Tokens are chosen by the embedded generator's own functions, and from its random numbers: vLLM is left to take the one token that this logits processor allows.

vLLM's own draws depend on how a prompt was cut into chunks (and on a CPU a request with a seed ends the engine when it is read in chunks); these depend on the request's seed, its prompt and the
number of the token alone, so that preempted requests, requests that are computed anew and other generators give the same. Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from intarsia_generation.engine.request import stream_of
from intarsia_generation.sampling import draw, probabilities
from intarsia_rl.contracts import Request, Sampling
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, MoveDirectionality

KEY = "intarsia_sampling"
"""In `SamplingParams.extra_args`: the fields of a `Sampling` that say how tokens are chosen."""

FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed")


def extra_of(request: Request) -> dict[str, Any]:
    """What a request carries to the processor. `prompt` is how many of vLLM's prompt tokens are the request's: forced ones follow."""
    return {KEY: {"prompt": len(request.tokens), **{name: getattr(request.sampling, name) for name in FIELDS}}}


@dataclasses.dataclass(eq=False)
class Stream:
    """How a request's tokens are chosen, and its random numbers by the number of the token. `output` is vLLM's own list of what was chosen so far, which grows."""

    sampling: Sampling
    prompt: list[int]
    output: list[int]
    numbers: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = stream_of(self.sampling, self.prompt)

    def number(self) -> float:
        """The next token's; the same until the token is there."""
        while len(self.numbers) <= len(self.output):
            self.numbers.append(self._random.random())
        return self.numbers[len(self.output)]


class OwnSampling(LogitsProcessor):
    """Makes every token but the chosen one impossible, for requests that carry our settings."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._streams: dict[int, Stream] = {}

    def is_argmax_invariant(self) -> bool:
        """It says what is chosen."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests from row to row."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._streams.pop(row, None)
        for row, parameters, prompt, output in batch_update.added:
            self._streams.pop(row, None)
            stream = stream_for(parameters, prompt, output)
            if stream is not None:
                self._streams[row] = stream
        for first, second, direction in batch_update.moved:
            there, other = self._streams.pop(first, None), self._streams.pop(second, None)
            if there is not None:
                self._streams[second] = there
            if other is not None and direction == MoveDirectionality.SWAP:
                self._streams[first] = other

    def apply(self, logits: Tensor) -> Tensor:
        """Float32 logits [N, V], changed in place."""
        rows = [row for row in sorted(self._streams) if row < logits.shape[0]]
        alike: dict[tuple[Any, ...], list[int]] = {}
        for row in rows:
            sampling = self._streams[row].sampling
            alike.setdefault((sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p), []).append(row)
        for some in alike.values():
            index = torch.tensor(some, device=logits.device)
            chosen = self._choose(logits[index], some)
            logits[index] = -torch.inf
            logits[index, chosen] = 0.0
        return logits

    def _choose(self, logits_NV: Tensor, rows: list[int]) -> Tensor:
        sampling = self._streams[rows[0]].sampling
        if sampling.temperature == 0:  # of log-probabilities the first of equals
            return logits_NV.log_softmax(-1).argmax(-1)
        uniform = torch.tensor([self._streams[row].number() for row in rows], dtype=torch.float64)
        return draw(probabilities(logits_NV, sampling), uniform.to(logits_NV.device))


def stream_for(parameters: SamplingParams, prompt: list[int] | None, output: list[int]) -> Stream | None:
    """The stream of a request, where it carries our settings."""
    settings = (parameters.extra_args or {}).get(KEY)
    if settings is None or prompt is None:
        return None
    sampling = Sampling(max_tokens=parameters.max_tokens or 1, **{name: settings[name] for name in FIELDS})
    return Stream(sampling, prompt[: settings["prompt"]], output)
