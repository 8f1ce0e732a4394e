"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; V3, 2412.19437).

B rows, S tokens, T entries of the latent, D model width, H heads, d head dim, C width of the latent (and of what is cached: latent and rotated key).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from intarsia import ops
from intarsia.contracts import CacheSpec, MixerSpec, SequenceContext
from torch import Tensor, nn

from intarsia_models_common.build import Linear, Scope, build
from intarsia_models_common.config import MLAConfig
from intarsia_models_common.rope import RopeTables

Attention = Callable[..., Tensor]
"""(queries [B, S, H, d], keys and values [B, T, H or 1, d], scale=) -> [B, S, H, d of the values]: it knows what each query sees."""


class MLA(nn.Module):
    """q = Wq_b Norm(Wq_a x) = [q_nope | q_rope];  [c | k_rope] = Wkv_a x;  [k_nope | v] = Wkv_b Norm(c)

    scores = (q_nope k_nope^T + R(q_rope) R(k_rope)^T) * scale,  y = Wo softmax(scores) v

    R rotates; k_rope is one key for all heads. Only Norm(c) and R(k_rope) need to be kept of a token: the context keeps them and calls back with all that
    it has. Two forms give the same numbers. Plain: keys and values of every entry are made, then attention as usual. Absorbed: since q_nope (W c) = (q_nope W) c,
    the queries are taken to the latent's space, and attention is over one shared key and value head, the latent itself. `form` is "auto" (whichever takes fewer
    multiplications; training is always plain), "plain" or "absorbed".

    Heads are counted from the projections' outputs by `query_dim` and `up_dim` (a head's key and value), so that a slice of the heads is the same module.
    `wq_a` and `wkv_a` are narrow and look at one token at a time; work on heads begins behind them.
    """

    def __init__(self, config: MLAConfig, scope: Scope) -> None:
        super().__init__()
        self.name = scope.name
        self.nope_dim, self.rope_dim, self.value_dim, self.kv_rank = config.nope_dim, config.rope_dim, config.value_dim, config.kv_rank
        self.query_dim, self.up_dim = config.nope_dim + config.rope_dim, config.nope_dim + config.value_dim
        self.scale = self.query_dim**-0.5 * scope.score_factor if config.scale is None else config.scale
        self.interleaved = scope.rope_interleaved
        self.form = "auto"
        if config.q_rank is None:
            self.wq = Linear(scope.dim, config.heads * self.query_dim, scope.std)
        else:
            self.wq_a = Linear(scope.dim, config.q_rank, scope.std)
            self.q_norm = build(config.norm, scope.inside("q_norm", config.q_rank))
            self.wq_b = Linear(config.q_rank, config.heads * self.query_dim, scope.std)
        self.queries_from_latent = config.q_rank is not None
        self.wkv_a = Linear(scope.dim, config.kv_rank + config.rope_dim, scope.std)
        self.kv_norm = build(config.norm, scope.inside("kv_norm", config.kv_rank))
        self.wkv_b = Linear(config.kv_rank, config.heads * self.up_dim, scope.std)
        self.wo = Linear(config.heads * config.value_dim, scope.dim, scope.output_std)

    def forward(self, x_BSD: Tensor, rope: RopeTables, context: SequenceContext) -> Tensor:
        """Same shape and dtype. The context decides what a token sees."""
        q = self.wq_b(self.q_norm(self.wq_a(x_BSD))) if self.queries_from_latent else self.wq(x_BSD)
        q_BSHd, turned_BSHd = q.unflatten(-1, (-1, self.query_dim)).split((self.nope_dim, self.rope_dim), -1)
        turned_BSHd = ops.rope(turned_BSHd, *rope, self.interleaved)
        latent_BSC, key_BSd = self.wkv_a(x_BSD).split((self.kv_rank, self.rope_dim), -1)
        key_BS1d = ops.rope(key_BSd.unsqueeze(-2), *rope, self.interleaved)
        kept_BSC = torch.cat((self.kv_norm(latent_BSC), key_BS1d.squeeze(-2)), -1)
        attend = functools.partial(self._attend, q_BSHd, turned_BSHd, context)
        y_BSHd = context.latent(self.name, kept_BSC, attend)
        return self.wo(y_BSHd.flatten(-2))

    def _attend(
        self,
        q_BSHd: Tensor,
        turned_BSHd: Tensor,
        context: SequenceContext,
        kept_BTC: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | None,
    ) -> Tensor:
        """What `SequenceContext.latent` calls back, [B, S, H, d]."""
        attention = _attention_of(context, positions_BT, documents_BT)
        attend = self._absorbed if self._absorbs(q_BSHd.shape[1], kept_BTC.shape[1]) else self._plain
        return attend(q_BSHd, turned_BSHd, kept_BTC, attention)

    def _absorbs(self, queries: int, entries: int) -> bool:
        """Whether the absorbed form is taken. It reads the weight itself, so it is not for training, nor where a sharder brings the weight as float8."""
        if self.form != "auto":
            return self.form == "absorbed"
        if torch.is_grad_enabled() or self.wkv_b.weight_payload is not None:
            return False
        up = self.kv_rank * self.up_dim
        plain = entries * up + queries * entries * (self.query_dim + self.value_dim)
        return queries * up + queries * entries * (2 * self.kv_rank + self.rope_dim) < plain

    def _plain(self, q_BSHd: Tensor, turned_BSHd: Tensor, kept_BTC: Tensor, attention: Attention) -> Tensor:
        latent_BTC, key_BTd = kept_BTC.split((self.kv_rank, self.rope_dim), -1)
        k_BTHd, v_BTHd = self.wkv_b(latent_BTC).unflatten(-1, (-1, self.up_dim)).split((self.nope_dim, self.value_dim), -1)
        key_BTHd = key_BTd.unsqueeze(-2).expand(*k_BTHd.shape[:-1], self.rope_dim)
        q, k = torch.cat((q_BSHd, turned_BSHd), -1), torch.cat((k_BTHd, key_BTHd), -1)
        return attention(q, k, v_BTHd, scale=self.scale)

    def _absorbed(self, q_BSHd: Tensor, turned_BSHd: Tensor, kept_BTC: Tensor, attention: Attention) -> Tensor:
        up_HdC = self.wkv_b.weight.unflatten(0, (-1, self.up_dim))
        keys_HdC, values_HdC = up_HdC.split((self.nope_dim, self.value_dim), 1)
        q_BSHC = torch.cat((torch.einsum("bshd,hdc->bshc", q_BSHd, keys_HdC), turned_BSHd), -1)
        entries_BT1C = kept_BTC.unsqueeze(-2)
        y_BSHC = attention(q_BSHC, entries_BT1C, entries_BT1C[..., : self.kv_rank], scale=self.scale)
        return torch.einsum("bshc,hdc->bshd", y_BSHC, values_HdC)

    def cache_spec(self) -> MixerSpec:
        """Of every past token the normed latent and, behind it, the rotated key."""
        dtype = str(self.wkv_b.weight.dtype).removeprefix("torch.")
        return MixerSpec("latent", (CacheSpec("latent", "paged", (self.kv_rank + self.rope_dim,), dtype),))

    def mixing_flops_per_token(self, sequence_tokens: int) -> float:
        """Forward FLOPs of scores and weighted values for one token (plain form), averaged over a causal sequence."""
        heads = self.wo.in_features // self.value_dim
        return heads * (self.query_dim + self.value_dim) * (sequence_tokens + 1)


def _attention_of(context: SequenceContext, positions_BT: Tensor, documents_BT: Tensor | None) -> Attention:
    """Attention of the new tokens over entries with these positions and documents: the context's own where it has one, which knows by segments what each token sees.

    Elsewhere `ops.attention`: where the entries are the new tokens themselves, causality and documents say it all and kernels know the packing; where there are
    others (a cache), positions say what is past.
    """
    own: Attention | None = getattr(context, "attention", None)
    if own is not None:
        return own
    mask: dict[str, Any] = {"documents_q_BS": getattr(context, "documents_BS", None), "documents_k_BT": documents_BT}
    if positions_BT is context.positions_BS:
        mask["packing"] = getattr(context, "packing", None)
    else:
        mask |= {"positions_q_BS": context.positions_BS, "positions_k_BT": positions_BT}
    return functools.partial(ops.attention, **mask)
