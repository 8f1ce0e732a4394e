"""Qwen3.5, on one device. B rows, S tokens, D model width, V vocabulary, K depths of multi-token prediction, N patches, M features.

tower:   features_MD = VisionTower(patches_NC)
enter:   x = Embedding[tokens], features in the places of the placeholder tokens
blocks:  a = x + Mixer(Norm(x));  x = a + F(Norm(a)),  Mixer gated DeltaNet three times, then gated softmax attention;  F a SwiGLU or a mixture of experts
leave:   hidden = Norm(x);  logits = hidden W^T

for k = 1 .. K:  u = P [Norm(token k places on, as it enters: its embedding or feature) | Norm(hidden)];  hidden = Norm(Block(u));  logits_k = hidden W^T

Norm(x) = (1 + w) x / rms(x). A quarter of each head of softmax attention is rotated, in three axes that take turns over the frequencies (interleaved M-RoPE).
"""

from __future__ import annotations

from typing import ClassVar

from intarsia_models_common.vision.ahead import AheadVisionModel


class Qwen35(AheadVisionModel):
    """Qwen3.5, as transformers' `Qwen3_5ForConditionalGeneration` and `Qwen3_5MoeForConditionalGeneration` compute it, with multi-token prediction as vLLM wires it:
    a depth is given the hidden states after the norm before it, and what stands in the following token's place, features of images included.

    Where the context has following tokens the result is a tuple: the hidden states that predict the next token, then those of each depth further ahead.
    """

    ahead_is_normed: ClassVar[bool] = True
