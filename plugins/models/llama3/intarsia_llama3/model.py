"""Llama 3, on one device. B rows, S tokens, D model width, V vocabulary.

enter:   x = Embedding[tokens]
blocks:  a = x + Attention(RMSNorm(x));  x = a + SwiGLU(RMSNorm(a))
leave:   hidden = RMSNorm(x);  logits = hidden W^T
"""

from __future__ import annotations

from intarsia_models_common.base import LanguageModel


class Llama3(LanguageModel):
    """Llama 3 (arXiv 2407.21783), as transformers' `LlamaForCausalLM` computes it: the common decoder as it is."""
