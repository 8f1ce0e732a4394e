"""Rotary positions (arXiv 2104.09864): frequencies, their scalings, and the tables that all layers of one forward pass share.

B rows, S tokens, d rotated pairs of a head.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from intarsia.errors import PluginError, UsageError
from torch import Tensor, nn

from intarsia_models_common.build import Scope
from intarsia_models_common.config import RopeConfig

RopeTables = tuple[Tensor, Tensor]
"""cos_BSd and sin_BSd, float32."""


class Rope(nn.Module):
    """cos and sin of position * frequency, float32 whatever the model's dtype. Its scope's `dim` is the head dim."""

    frequencies_d: Tensor

    def __init__(self, config: RopeConfig, scope: Scope) -> None:
        super().__init__()
        self.config = config
        self.dim = scope.dim if config.dim is None else config.dim
        self.factor = attention_factor(config)
        if config.sections is not None and sum(config.sections) != self.dim // 2:
            raise UsageError(
                f"rope.sections = {config.sections} are {sum(config.sections)} pairs, and a head has {self.dim // 2} that are rotated ({self.dim} dimensions)."
            )
        self.register_buffer("frequencies_d", torch.empty(self.dim // 2, dtype=torch.float32), persistent=False)
        self.fill_buffers()

    def forward(self, positions_BS: Tensor) -> RopeTables:
        """Tables for these positions (int64). With `sections` they may be [3, B, S]: a token's place in time, height and width."""
        angles_BSd = positions_BS[..., None].float() * self.frequencies_d
        if positions_BS.dim() == 3:
            angles_BSd = self._by_axes(angles_BSd)
        cos_BSd, sin_BSd = angles_BSd.cos(), angles_BSd.sin()
        if self.factor != 1.0:
            return cos_BSd * self.factor, sin_BSd * self.factor
        return cos_BSd, sin_BSd

    def _by_axes(self, angles_3BSd: Tensor) -> Tensor:
        """Each pair's angle along its own axis: time's, but height's where i % 3 = 1 and i < 3 `sections[1]`, and width's where i % 3 = 2 and i < 3 `sections[2]`."""
        if self.config.sections is None:
            raise PluginError("Rotary positions got positions on three axes and have no sections (rope.sections).")
        angles_BSd = angles_3BSd[0].clone()
        for axis in (1, 2):
            pairs = slice(axis, 3 * self.config.sections[axis], 3)
            angles_BSd[..., pairs] = angles_3BSd[axis, ..., pairs]
        return angles_BSd

    def fill_buffers(self) -> None:
        """Compute the frequencies on the buffer's device."""
        device = self.frequencies_d.device
        self.frequencies_d = frequencies(self.config, self.dim).to(device)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # A model cast to bfloat16, or moved off the meta device, keeps its frequencies, and keeps them in float32.
        super()._apply(fn, recurse)
        self.fill_buffers()
        return self


def frequencies(config: RopeConfig, dim: int) -> Tensor:
    """Angular frequency of each pair, [dim / 2] float32 on the CPU, scaled as `config` says."""
    plain_d = 1.0 / config.theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim)
    if config.scaling == "linear":
        return plain_d / config.factor
    if config.scaling == "llama3":
        return _llama3(config, plain_d)
    if config.scaling == "yarn":
        return _yarn(config, plain_d, dim)
    return plain_d


def _llama3(config: RopeConfig, plain_d: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched in full, short ones stay, between them a blend that is linear in turns per original context."""
    turns_d = config.original_positions * plain_d / (2 * math.pi)
    low, high = config.low_frequency_factor, config.high_frequency_factor
    keep_d = ((turns_d - low) / (high - low)).clamp(0, 1)
    return (1 - keep_d) * plain_d / config.factor + keep_d * plain_d


def _yarn(config: RopeConfig, plain_d: Tensor, dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071), NTK by parts: the blend is linear in the pair's number between two bounds."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(config.original_positions / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp_d = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    keep_d = 1 - ramp_d.clamp(0, 1)
    return plain_d / config.factor * (1 - keep_d) + plain_d * keep_d


def attention_factor(config: RopeConfig) -> float:
    """What cosine and sine are multiplied by: 1 but for YaRN."""

    if config.scaling != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _softened(config, config.mscale) / _softened(config, config.mscale_all_dim)
    return _softened(config, 1.0)


def score_factor(config: RopeConfig) -> float:
    """What DeepSeek's attention multiplies its scores by, at every length: YaRN's factor for `mscale_all_dim`, squared; 1 where that is not set."""
    return _softened(config, config.mscale_all_dim) ** 2 if config.scaling == "yarn" and config.mscale_all_dim else 1.0


def _softened(config: RopeConfig, mscale: float) -> float:
    return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0
