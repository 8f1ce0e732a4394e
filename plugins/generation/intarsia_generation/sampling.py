"""From logits to the next token. Pure functions. Shape suffixes: B sequences, V vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from intarsia_generation.settings import SamplingConfig

NEVER = float("-inf")
SMALLEST = torch.finfo(torch.float32).tiny


class Settings(Protocol):
    """What `probabilities` reads; `SamplingConfig` says what each means."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


def keep_top_k(logits_BV: Tensor, k: int) -> Tensor:
    """Tokens less likely than the k-th become impossible. Equals of the k-th stay."""
    kth_B1 = logits_BV.topk(min(k, logits_BV.shape[-1]), dim=-1).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < kth_B1, NEVER)


def keep_top_p(logits_BV: Tensor, p: float) -> Tensor:
    """Only the smallest set of likeliest tokens whose probabilities sum to at least p stays possible (arXiv 1904.09751); the likeliest always does."""
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    probabilities_BV = sorted_BV.softmax(-1)
    before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
    drop_BV = before_BV >= p
    drop_BV[:, 0] = False
    return logits_BV.masked_fill(torch.zeros_like(drop_BV).scatter(-1, order_BV, drop_BV), NEVER)


def keep_min_p(logits_BV: Tensor, share: float) -> Tensor:
    """Tokens less than `share` times as likely as the likeliest become impossible (arXiv 2407.01082)."""
    probabilities_BV = logits_BV.softmax(-1)
    return logits_BV.masked_fill(probabilities_BV < share * probabilities_BV.amax(-1, keepdim=True), NEVER)


def probabilities(logits_BV: Tensor, config: Settings) -> Tensor:
    """What a token is drawn by, float32: temperature, top-k, top-p, min-p, softmax. The temperature must not be 0."""
    # Below the likeliest, which stays 0 however small the temperature is: a quotient that overflows would be no number.
    logits_BV = logits_BV.float() - logits_BV.float().amax(-1, keepdim=True)
    logits_BV = logits_BV / max(config.temperature, SMALLEST)
    if config.top_k is not None:
        logits_BV = keep_top_k(logits_BV, config.top_k)
    if config.top_p < 1:
        logits_BV = keep_top_p(logits_BV, config.top_p)
    if config.min_p > 0:
        logits_BV = keep_min_p(logits_BV, config.min_p)
    return logits_BV.softmax(-1)


def draw(probabilities_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """One token for each row, [B] int64: the first whose cumulative probability exceeds the row's uniform number in [0, 1). Never an impossible one."""
    cumulative_BV = probabilities_BV.double().cumsum(-1)
    threshold_B1 = uniform_B.double()[:, None] * cumulative_BV[:, -1:]
    tokens_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(-1)
    last_B = probabilities_BV.shape[-1] - 1 - probabilities_BV.flip(-1).gt(0).int().argmax(-1)
    return torch.minimum(tokens_B, last_B)


def choose(logits_BV: Tensor, config: SamplingConfig, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """The next token of each row, [B] int64, and its log-probability under the model itself, [B] float32 (temperature 1, nothing left out).

    Greedy takes the first of equals. Otherwise each row draws one number from its own generator, on the CPU.
    """
    log_probabilities_BV = logits_BV.float().log_softmax(-1)
    if config.greedy:
        tokens_B = log_probabilities_BV.argmax(-1)
    else:
        numbers = [torch.rand((), generator=generator, dtype=torch.float64) for generator in generators]
        tokens_B = draw(probabilities(logits_BV, config), torch.stack(numbers).to(logits_BV.device))
    return tokens_B, log_probabilities_BV.gather(-1, tokens_B[:, None]).squeeze(-1)


def generator_for(seed: int, prompt: Sequence[int], sample: int, shown: str = "") -> torch.Generator:
    """The stream of one completion: a function of the seed, the prompt's tokens, the sample's number and a digest of what the prompt shows."""
    text = f"{seed}/{sample}/{','.join(map(str, prompt))}" + (f"/{shown}" if shown else "")
    generator = torch.Generator("cpu")
    generator.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1)
    return generator
