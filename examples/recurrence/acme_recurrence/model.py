"""The family, on one device. B rows, S tokens, D model width, H heads, d head dim.

x = Embedding[tokens]
for each layer:  a = x + Mixer(RMSNorm(x));  x = a + SwiGLU(RMSNorm(a))
hidden = RMSNorm(x);  logits = hidden W^T
"""

from __future__ import annotations

from intarsia.contracts import CacheSpec, MixerSpec, SequenceContext
from intarsia_models_common.base import LanguageModel
from intarsia_models_common.build import Linear, Scope
from intarsia_models_common.rope import RopeTables
from torch import Tensor, nn
from torch.nn import functional as F

from acme_recurrence.config import GatedRecurrenceConfig
from acme_recurrence.recurrence import GatedRecurrence


class GatedRecurrenceMixer(nn.Module):
    """y = Wo recurrence(Wq x / sqrt(d), Wk x / sqrt(d), Wv x, log sigmoid(Wa x + 2)). Positions are the recurrence's own affair: nothing is rotated."""

    def __init__(self, config: GatedRecurrenceConfig, scope: Scope) -> None:
        super().__init__()
        self.name, self.head_dim = scope.name, config.head_dim
        width = config.heads * config.head_dim
        self.wq, self.wk, self.wv = (Linear(scope.dim, width, scope.std) for _ in range(3))
        self.wa = Linear(scope.dim, config.heads, scope.std)
        self.wo = Linear(width, scope.dim, scope.output_std)
        self.update = GatedRecurrence()

    def forward(self, x_BSD: Tensor, rope: RopeTables, context: SequenceContext) -> Tensor:
        """Same shape and dtype. The context keeps the state."""
        q_BSHd, k_BSHd, v_BSHd = (w(x_BSD).unflatten(-1, (-1, self.head_dim)).float() for w in (self.wq, self.wk, self.wv))
        decay_BSH = F.logsigmoid(self.wa(x_BSD).float() + 2.0)
        scale = self.head_dim**-0.5
        y_BSHd = context.recurrent(self.name, "state", self.update, q_BSHd * scale, k_BSHd * scale, v_BSHd, decay_BSH)
        return self.wo(y_BSHd.flatten(-2).to(x_BSD.dtype))

    def cache_spec(self) -> MixerSpec:
        """One matrix for each head, however long the row is."""
        heads = self.wa.out_features
        return MixerSpec("recurrent", (CacheSpec("state", "state", (heads, self.head_dim, self.head_dim), "float32"),))

    def mixing_flops_per_token(self, sequence_tokens: int) -> float:
        """Forward FLOPs of the state's update and of reading it."""
        return 4.0 * self.wq.out_features * self.head_dim


class ToyRecurrence(LanguageModel):
    """A decoder whose config says which blocks are recurrent and which attend: the common base builds it, block by block."""
