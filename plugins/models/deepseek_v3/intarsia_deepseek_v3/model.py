"""DeepSeek-V3, on one device. B rows, S tokens, D model width, V vocabulary, K depths of multi-token prediction.

x = Embedding[tokens]
for each layer:  a = x + MLA(RMSNorm(x));  x = a + F(RMSNorm(a)),  F a SwiGLU in the first layers, a mixture of experts in the others
hidden = RMSNorm(x);  logits = hidden W^T

for k = 1 .. K:  u = P [RMSNorm(Embedding[token k places on]) | RMSNorm(x)];  x = Block(u);  hidden_k = RMSNorm(x);  logits_k = hidden_k W^T
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from intarsia.contracts import Regions, SequenceContext
from intarsia_models_common.base import Embedding, LanguageModel
from intarsia_models_common.build import Linear, Scope, build
from intarsia_models_common.config import BlockConfig, NormConfig
from intarsia_models_common.rope import RopeTables
from torch import Tensor, nn

from intarsia_deepseek_v3.config import DeepSeekV3Config


class TokenAhead(nn.Module):
    """One depth of multi-token prediction: from what is known of a token, and the token k places on, the hidden state that predicts the one behind it."""

    def __init__(self, config: BlockConfig, norm: NormConfig, scope: Scope) -> None:
        super().__init__()
        self.token_norm = build(norm, scope.inside("token_norm"))
        self.hidden_norm = build(norm, scope.inside("hidden_norm"))
        self.projection = Linear(2 * scope.dim, scope.dim, scope.std)
        self.block = build(config, scope.inside("block"))
        self.norm = build(norm, scope.inside("norm"))

    def forward(self, x_BSD: Tensor, token_BSD: Tensor, rope: RopeTables, context: SequenceContext) -> tuple[Tensor, Tensor]:
        """The residual stream for the next depth, and the hidden state, [B, S, D] both. `token_BSD` is the embedding of the token further on."""
        u_BSD = self.projection(torch.cat((self.token_norm(token_BSD), self.hidden_norm(x_BSD)), -1))
        y_BSD = self.block(u_BSD, rope, context)
        return y_BSD, self.norm(y_BSD)


class DeepSeekV3(LanguageModel):
    """DeepSeek-V3 (arXiv 2412.19437), as transformers' `DeepseekV3ForCausalLM` computes it, with multi-token prediction.

    Where the context has following tokens the result is a tuple: the hidden states that predict the next token, then those of each depth further ahead.
    """

    def __init__(self, config: DeepSeekV3Config) -> None:
        super().__init__(config)
        self.predicts_ahead = len(config.ahead)
        if self.predicts_ahead:
            self.following_embeddings = Embedding(config.vocab_size, config.dim, config.embedding_std)
            self.following_embeddings.weight = self.tok_embeddings.weight
        self.mtp = nn.ModuleList([TokenAhead(block, config.norm, self._scope_ahead(k)) for k, block in enumerate(config.ahead)])

    def _scope_ahead(self, k: int) -> Scope:
        return dataclasses.replace(self.scope_of(len(self.config.layers) + k), name=f"mtp.{k}")

    def run_block(self, name: str, carry: Any, shared: Any, context: SequenceContext) -> Any:
        """The depths of multi-token prediction are regions like blocks, but what they add comes at the end: see `leave`."""
        return carry if name.startswith("mtp.") else super().run_block(name, carry, shared, context)

    def leave(self, carry: Tensor, shared: RopeTables, context: SequenceContext) -> Tensor | tuple[Tensor, ...]:
        """Hidden states after the last norm, [B, S, D]; with following tokens a tuple of K + 1 of them."""
        hidden_BSD = self.norm(carry)
        following_BSK: Tensor | None = getattr(context, "following_BSK", None)
        if following_BSK is None or not self.predicts_ahead:
            return hidden_BSD
        results = [hidden_BSD]
        for k, depth in enumerate(self.mtp):
            carry, hidden_BSD = depth(carry, self.following_embeddings(following_BSK[..., k]), shared, context)
            results.append(hidden_BSD)
        return tuple(results)

    def regions(self) -> Regions:
        """Each block and each depth is a unit of sharding, recomputation and compilation; a pipeline is cut between blocks only."""
        plain = super().regions()
        depths = tuple(f"mtp.{k}" for k, depth in enumerate(self.mtp or ()) if depth is not None)
        shared = [name for name in ("tok_embeddings", "head", "following_embeddings") if name != "head" or self.config.tied]
        names = tuple(f"{name}.weight" for name in shared if getattr(self, name, None) is not None)
        blocks = plain.blocks + depths
        return dataclasses.replace(plain, blocks=blocks, compile=blocks, ties=(names,) if len(names) > 1 else (), stages=plain.blocks)

    def stage_modules(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Outside of the blocks and depths: what a pipeline's first stage needs, and what its last."""
        return ("tok_embeddings",), ("norm", "head", *(("following_embeddings",) if self.predicts_ahead else ()))

    def flops_per_token(self, sequence_tokens: int) -> float:
        """The head is multiplied by once for each depth more."""
        return super().flops_per_token(sequence_tokens) + 3.0 * self.predicts_ahead * 2.0 * self.config.vocab_size * self.config.dim
