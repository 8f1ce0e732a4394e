"""Settings of the embedded generator. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

import chz
from intarsia.errors import UsageError, did_you_mean
from intarsia_rl.bases import GeneratorConfig

EXPERTS = ("whole", "cut")
GRAPHS = ("auto", "on", "off")


@chz.chz(typecheck=True)
class LocalConfig(GeneratorConfig):
    """The embedded generator: paged caches, on one device, or cut over several."""

    tensor: int = chz.field(
        default=1,
        doc="Over how many processes, each with a device of its own, the model is cut, as its family's sharding table says under tp.",
    )
    experts: str = chz.field(
        default="whole",
        doc="With tensor above 1, of a mixture of experts: whole (every rank has all experts, for its part of the tokens) or cut (every rank has its share of them, and tokens go where theirs "
        "are).",
    )
    block: int = chz.field(default=16, doc="Tokens in a block of the caches.")
    blocks: int | None = chz.field(default=None, doc="How many blocks there are; none: what cache_bytes holds.")
    cache_bytes: int | None = chz.field(
        default=None,
        doc="Bytes of all caches; none: what max_sequences of full length take, at most 512 MiB on a CPU and 60 % of the free memory of a GPU.",
    )
    max_sequences: int = chz.field(default=64, doc="Most requests that are computed together.")
    max_batch_tokens: int = chz.field(
        default=2048,
        doc="Most tokens in one step: one for each request that is being continued, the rest for prompts, which are read in pieces.",
    )
    max_tokens: int | None = chz.field(
        default=None, doc="Most tokens of a request, prompt and completion together; none: the model's positions."
    )
    prefix_cache: bool = chz.field(default=True, doc="Keep what requests computed, and read it where another request begins alike.")
    graphs: str = chz.field(
        default="auto",
        doc="Whether steps of decoding are CUDA graphs: auto (where that is possible), on (an error where it is not) or off.",
    )
    dtype: str = chz.field(default="auto", doc="What the model computes in; auto: precision.compute of the recipe.")
    device: str = chz.field(default="auto", doc="auto, cpu or cuda.")
    kernels: Mapping[str, str] = chz.field(
        default_factory=dict,
        doc="Operator (or *) to kernel, over those of the recipe; in batch-invariant mode only such kernels are taken.",
    )

    @chz.validate
    def _numbers_fit(self) -> None:
        if self.experts not in EXPERTS:
            raise UsageError(f"generator.experts is {self.experts!r}. {did_you_mean(self.experts, EXPERTS)}")
        if self.graphs not in GRAPHS:
            raise UsageError(f"generator.graphs is {self.graphs!r}. {did_you_mean(self.graphs, GRAPHS)}")
        for name, least in (("tensor", 1), ("block", 1), ("blocks", 2), ("cache_bytes", 1), ("max_sequences", 1), ("max_tokens", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"generator.{name} is {value}; it must be at least {least}.")
        if self.max_batch_tokens <= self.max_sequences:
            raise UsageError(
                f"generator.max_batch_tokens = {self.max_batch_tokens} must be above generator.max_sequences = {self.max_sequences}: each request that is "
                "continued takes one token of a step, and prompts are read with the rest."
            )
