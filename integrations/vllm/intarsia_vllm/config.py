"""Settings of the generator `vllm`. Torch-free."""

from __future__ import annotations

import chz
from intarsia_rl.bases import GeneratorConfig


@chz.chz(typecheck=True)
class VllmConfig(GeneratorConfig):
    """The vLLM engine with this platform's own model in it. It is installed by itself: see the distribution's README."""

    dtype: str = chz.field(default="auto", doc="Dtype of weights, activations and caches; auto: what the run computes in.")
    max_tokens: int | None = chz.field(default=None, doc="Most tokens of prompt and completion together; none: the model's positions.")
    max_sequences: int = chz.field(default=16, doc="Most requests that are computed at once.")
    batched_tokens: int = chz.field(default=2048, doc="Most tokens in one forward pass; longer prompts are read in chunks.")
    block: int = chz.field(default=32, doc="Tokens in one block of the paged cache; whole blocks are shared by the prefix cache.")
    cache_mib: int | None = chz.field(
        default=None, doc="Memory of the paged cache in MiB; none: 512 on a CPU, what gpu_memory leaves on a GPU."
    )
    gpu_memory: float = chz.field(default=0.5, doc="Share of a GPU's memory that the engine takes.")
    prefix_cache: bool = chz.field(default=True, doc="Keep the caches of prompts for those that begin alike.")
