"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437). B rows, S tokens, D model width, V vocabulary, K depths.

for k = 1 .. K:  u = P [Norm(Embedding[token k places on]) | Norm(x)];  x = Block(u);  hidden_k = Norm(x);  logits_k = hidden_k W^T

A family's config has a field `ahead`, a block for each depth; embedding and output projection are the trunk's.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from intarsia.contracts import Regions, SequenceContext
from torch import Tensor, nn

from intarsia_models_common.base import Embedding, LanguageModel
from intarsia_models_common.build import Linear, Scope, build
from intarsia_models_common.config import BlockConfig, NormConfig
from intarsia_models_common.rope import RopeTables


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
        """The block's residual stream and, of it, the hidden state, [B, S, D] both. `token_BSD` is the embedding of the token further on."""
        u_BSD = self.projection(torch.cat((self.token_norm(token_BSD), self.hidden_norm(x_BSD)), -1))
        y_BSD = self.block(u_BSD, rope, context)
        return y_BSD, self.norm(y_BSD)


class AheadModel(LanguageModel):
    """A decoder that predicts further tokens: as a family's only base, or before another one. Stability: provisional.

    Where the context has following tokens the result is a tuple: the hidden states that predict the next token, then those of each depth further ahead.
    """

    # What a depth is given: the residual stream (DeepSeek), or the hidden states after its norm (Qwen).
    ahead_is_normed: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
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

    def leave(self, carry: Any, shared: RopeTables, context: SequenceContext) -> Tensor | tuple[Tensor, ...]:
        """Hidden states after the last norm, [B, S, D]; with following tokens a tuple of K + 1 of them."""
        stream_BSD, features_BSKD = self.parted(carry)
        hidden_BSD = super().leave(stream_BSD, shared, context)
        following_BSK: Tensor | None = getattr(context, "following_BSK", None)
        if following_BSK is None or not self.predicts_ahead:
            return hidden_BSD
        results = [hidden_BSD]
        x_BSD = hidden_BSD if self.ahead_is_normed else stream_BSD
        for k, depth in enumerate(self.mtp):
            y_BSD, hidden_BSD = depth(x_BSD, self.token_ahead(k, following_BSK, features_BSKD, context), shared, context)
            x_BSD = hidden_BSD if self.ahead_is_normed else y_BSD
            results.append(hidden_BSD)
        return tuple(results)

    def parted(self, carry: Any) -> tuple[Any, Tensor | None]:
        """The residual stream, and what stands instead of embeddings in the places of following tokens (None: nothing does)."""
        return carry, None

    def token_ahead(self, k: int, following_BSK: Tensor, features_BSKD: Tensor | None, context: SequenceContext) -> Tensor:
        """What depth k is given of the token k + 1 places further on, [B, S, D]: its embedding."""
        embedded_BSD: Tensor = self.following_embeddings(following_BSK[..., k])
        return embedded_BSD

    def regions(self) -> Regions:
        """Each block and each depth is a unit of sharding, recomputation and compilation; a pipeline is cut where it is without them."""
        plain = super().regions()
        depths = tuple(f"mtp.{k}" for k, depth in enumerate(self.mtp or ()) if depth is not None)
        shared = [name for name in ("tok_embeddings", "head", "following_embeddings") if name != "head" or self.config.tied]
        names = tuple(f"{name}.weight" for name in shared if getattr(self, name, None) is not None)
        return dataclasses.replace(
            plain,
            blocks=plain.blocks + depths,
            compile=plain.compile + depths,
            ties=(names,) if len(names) > 1 else (),
            stages=plain.stages or plain.blocks,
        )

    def stage_modules(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Outside of the blocks and depths: what a pipeline's first stage needs, and what its last."""
        say = getattr(super(), "stage_modules", lambda: (("tok_embeddings",), ("norm", "head")))
        first, last = say()
        return first, (*last, *(("following_embeddings",) if self.predicts_ahead else ()))

    def flops_per_token(self, sequence_tokens: int) -> float:
        """The head is multiplied by once for each depth more."""
        return super().flops_per_token(sequence_tokens) + 3.0 * self.predicts_ahead * 2.0 * self.config.vocab_size * self.config.dim
