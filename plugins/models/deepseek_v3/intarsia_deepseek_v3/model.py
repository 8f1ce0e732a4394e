"""DeepSeek-V3, on one device. B rows, S tokens, D model width, V vocabulary, K depths of multi-token prediction.

x = Embedding[tokens]
for each layer:  a = x + MLA(RMSNorm(x));  x = a + F(RMSNorm(a)),  F a SwiGLU in the first layers, a mixture of experts in the others
hidden = RMSNorm(x);  logits = hidden W^T

for k = 1 .. K:  u = P [RMSNorm(Embedding[token k places on]) | RMSNorm(x)];  x = Block(u);  hidden_k = RMSNorm(x);  logits_k = hidden_k W^T
"""

from __future__ import annotations

from intarsia_models_common.ahead import AheadModel


class DeepSeekV3(AheadModel):
    """DeepSeek-V3 (arXiv 2412.19437), as transformers' `DeepseekV3ForCausalLM` computes it, with multi-token prediction from the residual stream."""
