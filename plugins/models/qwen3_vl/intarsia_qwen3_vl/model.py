"""Qwen3-VL, on one device. B rows, S tokens, D model width, V vocabulary, N patches, M features.

tower:   features_MD, deep_1 .. deep_K = VisionTower(patches_NC)
enter:   x = Embedding[tokens], features in the places of the placeholder tokens
blocks:  a = x + Attention(RMSNorm(x));  x = a + F(RMSNorm(a)),  F a SwiGLU or a mixture of experts
         behind block k < K:  x = x + deep_k in the places of the placeholder tokens (DeepStack)
leave:   hidden = RMSNorm(x);  logits = hidden W^T

Rotary positions have three axes, time, height and width, which take turns over the frequencies (interleaved M-RoPE).
"""

from __future__ import annotations

from intarsia_models_common.vision.base import VisionLanguageModel


class Qwen3VL(VisionLanguageModel):
    """Qwen3-VL, as transformers' `Qwen3VLForConditionalGeneration` and `Qwen3VLMoeForConditionalGeneration` compute it: the common decoder that sees, as it is."""
