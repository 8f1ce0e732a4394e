"""Qwen3, on one device. B rows, S tokens, D model width, V vocabulary.

enter:   x = Embedding[tokens]
blocks:  a = x + Attention(RMSNorm(x));  x = a + F(RMSNorm(a)),  F a SwiGLU or a mixture of experts
leave:   hidden = RMSNorm(x);  logits = hidden W^T

Attention normalises each query and key head before it rotates them. Experts are balanced by one loss of all layers together.
"""

from __future__ import annotations

from intarsia_models_common.base import LanguageModel


class Qwen3(LanguageModel):
    """Qwen3 (arXiv 2505.09388), as transformers' `Qwen3ForCausalLM` and `Qwen3MoeForCausalLM` compute it: the common decoder as it is."""
