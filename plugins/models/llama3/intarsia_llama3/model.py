"""Llama 3, on one device. B rows, S tokens, D model width, V vocabulary.

x = Embedding[tokens]
for each layer:  a = x + Attention(RMSNorm(x));  x = a + SwiGLU(RMSNorm(a))
hidden = RMSNorm(x);  logits = hidden W^T
"""

from __future__ import annotations

from intarsia.contracts import SequenceContext
from intarsia_models_common.base import LanguageModel
from torch import Tensor


class Llama3(LanguageModel):
    """Llama 3 (arXiv 2407.21783), as transformers' `LlamaForCausalLM` computes it."""

    def forward(self, tokens_BS: Tensor, context: SequenceContext) -> Tensor:
        """Hidden states after the last norm, [B, S, D]."""
        x_BSD = self.tok_embeddings(tokens_BS)
        rope = self.rope(context.positions_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, rope, context)
        return self.norm(x_BSD)
