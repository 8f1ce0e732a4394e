"""Settings of linear attention. Torch-free."""

from __future__ import annotations

import chz
from intarsia.errors import UsageError

from intarsia_models_common.config import MixerConfig, check_between


@chz.chz(typecheck=True)
class GatedDeltaNetConfig(MixerConfig):
    """Gated DeltaNet: a recurrence with a matrix of state for each value head, behind a short convolution (arXiv 2412.06464)."""

    key_heads: int = chz.field(doc="Heads of queries and keys.")
    value_heads: int = chz.field(
        doc="Heads of values, each with a state and a gate; each key head serves value_heads / key_heads of them, one behind the other."
    )
    key_dim: int = chz.field(doc="Dimension of a query or key head.")
    value_dim: int = chz.field(doc="Dimension of a value head.")
    kernel: int = chz.field(default=4, doc="Taps of the convolution over queries, keys and values.")
    norm_eps: float = chz.field(default=1e-6, doc="Epsilon of the norm over each head's output.")
    chunk: int = chz.field(default=64, doc="Tokens that are computed together by matrix products.", metadata={"computes": False})
    recompute: bool = chz.field(
        default=False,
        doc="Keep only some chunks' states for backward and compute the rest again, where no kernel does.",
        metadata={"computes": False},
    )

    @chz.validate
    def _sizes_fit(self) -> None:
        for field in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel", "chunk"):
            check_between(f"gated_delta_net.{field}", getattr(self, field), 1)
        check_between("gated_delta_net.norm_eps", self.norm_eps, 0)
        if self.value_heads % self.key_heads:
            raise UsageError(
                f"gated_delta_net.value_heads = {self.value_heads} is not a multiple of gated_delta_net.key_heads = {self.key_heads}."
            )
