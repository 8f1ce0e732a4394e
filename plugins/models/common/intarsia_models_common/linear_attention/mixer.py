"""Gated DeltaNet (arXiv 2412.06464) as Qwen3-Next and Qwen3.5 have it.

B rows, S tokens, D model width, C channels of queries, keys and values together, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from intarsia.contracts import CacheSpec, Init, MixerSpec, SequenceContext
from torch import Tensor, nn
from torch.nn import functional as F

from intarsia_models_common.build import Linear, Scope, parameter
from intarsia_models_common.config import RMSNormConfig
from intarsia_models_common.linear_attention.config import GatedDeltaNetConfig
from intarsia_models_common.linear_attention.tokens import wide
from intarsia_models_common.linear_attention.updates import DeltaRuleUpdate, ShortConvUpdate
from intarsia_models_common.norm import RMSNorm
from intarsia_models_common.rope import RopeTables

DECAY_BIAS = -3.0
"""Where `dt_bias` starts: softplus of it is 0.05."""


class Taps(nn.Module):
    """A convolution's weight, [channels, kernel], the tap of the token itself last. It starts with the deviation of a uniform distribution over kernel^-0.5 to both sides."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = parameter(channels, kernel)

    def inits(self) -> dict[str, Init]:
        """Normal."""
        return {"weight": Init("normal", std=(3 * self.kernel) ** -0.5)}


class GatedDeltaNet(nn.Module):
    """q, k, v = silu(conv(W x)), b = sigmoid(Wb x), g = -e^log_a softplus(Wa x + dt_bias), the last two in float32;

        y = Wo concat( norm(delta_rule(q / |q|, k / |k|, v, g, b)) * silu(Wz x) )

    Nothing is rotated. A key head serves the value heads that stand behind one another for it. Heads are counted from the projections' outputs by `key_dim` and `value_dim`, never from the config,
    so that a slice of the heads is the same module. Of a sequence the last inputs of the convolution are kept (`conv`) and a matrix for each value head (`delta`).

    The published models start `dt_bias` at 1 and e^log_a uniformly up to 16, by which half of the heads forget all within a token. Here log_a is normal around 0 and `dt_bias` is -3: heads remember from
    a few tokens to some hundreds, evenly on the scale of logarithms.
    """

    # Sums of small numbers in an exponent: bfloat16 would move decays by a percent.
    keeps_float32: ClassVar[tuple[str, ...]] = ("log_a", "dt_bias")

    def __init__(self, config: GatedDeltaNetConfig, scope: Scope) -> None:
        super().__init__()
        self.name, self.key_dim, self.value_dim, self.kernel = scope.name, config.key_dim, config.value_dim, config.kernel
        self.chunk, self.recompute = config.chunk, config.recompute
        keys, values = config.key_heads * config.key_dim, config.value_heads * config.value_dim
        self.wq, self.wk = Linear(scope.dim, keys, scope.std), Linear(scope.dim, keys, scope.std)
        self.wv, self.wz = Linear(scope.dim, values, scope.std), Linear(scope.dim, values, scope.std)
        self.wb, self.wa = Linear(scope.dim, config.value_heads, scope.std), Linear(scope.dim, config.value_heads, scope.std)
        self.q_conv, self.k_conv, self.v_conv = (Taps(channels, config.kernel) for channels in (keys, keys, values))
        self.log_a, self.dt_bias = parameter(config.value_heads), parameter(config.value_heads)
        self.norm = RMSNorm(RMSNormConfig(eps=config.norm_eps), scope.inside("norm", config.value_dim))
        self.wo = Linear(values, scope.dim, scope.output_std)
        self.conv_update, self.delta_update = ShortConvUpdate(), DeltaRuleUpdate()

    def forward(self, x_BSD: Tensor, rope: RopeTables, context: SequenceContext) -> Tensor:
        """Same shape and dtype. The context keeps the states."""
        mixed_BSC = torch.cat((self.wq(x_BSD), self.wk(x_BSD), self.wv(x_BSD)), -1)
        taps_CK = torch.cat((self.q_conv.weight, self.k_conv.weight, self.v_conv.weight))
        mixed_BSC = context.recurrent(self.name, "conv", self.conv_update, mixed_BSC, weight_CK=taps_CK)
        keys, values = self.wk.out_features, self.wv.out_features
        q_BSC, k_BSC, v_BSC = mixed_BSC.split((keys, keys, values), -1)
        q_BSHK, k_BSHK = (self._for_value_heads(x.unflatten(-1, (-1, self.key_dim))) for x in (q_BSC, k_BSC))
        dtype = wide(x_BSD.dtype)
        beta_BSH = self.wb(x_BSD).to(dtype).sigmoid()
        # The softplus. Of torch's own, compiled code mistakes the layout of the gradient.
        step_BSH = torch.logaddexp(self.wa(x_BSD).to(dtype) + self.dt_bias.to(dtype), self.dt_bias.new_zeros((), dtype=dtype))
        decay_BSH = -self.log_a.to(dtype).exp() * step_BSH
        y_BSHV = context.recurrent(
            self.name,
            "delta",
            self.delta_update,
            q_BSHK,
            k_BSHK,
            v_BSC.unflatten(-1, (-1, self.value_dim)),
            decay_BSH,
            beta_BSH,
            scale=self.key_dim**-0.5,
            normalise=True,
            chunk=self.chunk,
            form="recurrent" if x_BSD.shape[1] == 1 else "chunked",
            recompute=self.recompute,
        )
        z_BSHV = self.wz(x_BSD).unflatten(-1, (-1, self.value_dim))
        gated_BSHV = (self.norm(y_BSHV).to(dtype) * F.silu(z_BSHV.to(dtype))).to(x_BSD.dtype)
        return self.wo(gated_BSHV.flatten(-2))

    def _for_value_heads(self, x_BSHK: Tensor) -> Tensor:
        repeats = self.wv.out_features * self.key_dim // (self.wk.out_features * self.value_dim)
        return x_BSHK if repeats == 1 else x_BSHK.repeat_interleave(repeats, 2)

    def cache_spec(self) -> MixerSpec:
        """Past inputs of the convolution, and a matrix for each value head in float32."""
        dtype = self.wv.weight.dtype
        channels = self.wq.out_features + self.wk.out_features + self.wv.out_features
        heads = self.wv.out_features // self.value_dim
        conv = CacheSpec("conv", "state", (self.kernel - 1, channels), str(dtype).removeprefix("torch."))
        delta = CacheSpec("delta", "state", (heads, self.key_dim, self.value_dim), str(wide(dtype)).removeprefix("torch."))
        return MixerSpec("recurrent", (conv, delta))

    def mixing_flops_per_token(self, sequence_tokens: int) -> float:
        """Forward FLOPs for one token of the convolution and of the chunked form: three products with the state, and within a chunk triangles, counted by what they hold."""
        heads, chunk = self.wv.out_features // self.value_dim, min(self.chunk, sequence_tokens)
        state = 6.0 * self.key_dim * self.value_dim
        inside = chunk * (3.0 * self.key_dim + 2.0 * self.value_dim)
        channels = self.wq.out_features + self.wk.out_features + self.wv.out_features
        return heads * (state + inside) + 2.0 * self.kernel * channels

    def inits(self) -> dict[str, Init]:
        """See the class."""
        return {"log_a": Init("normal", std=1.0), "dt_bias": Init("constant", value=DECAY_BIAS)}
