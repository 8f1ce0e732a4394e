"""Settings of the paralleliser and of the roles. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import ParallelConfig, RoleConfig
from intarsia.errors import UsageError, did_you_mean
from intarsia_models_common.config import check_between
from intarsia_models_common.moe.config import DispatcherConfig

VISION = ("whole", "shared", "balanced")


@chz.chz(typecheck=True)
class DeclaredConfig(ParallelConfig):
    """Cuts a model as its family's sharding table declares."""

    # Tensor parallelism.
    async_tensor: bool = chz.field(
        default=False,
        doc="Overlap tensor parallelism's communication with its matrix products, by torch's symmetric-memory operators: CUDA only.",
    )

    # Context parallelism (context/).
    context: str = chz.field(
        default="auto",
        doc="How softmax attention sees other ranks' tokens: ring, gather, ulysses, or auto, by the cost rule of `intarsia_parallel.context.choose`.",
    )

    # Experts (experts/).
    dispatcher: DispatcherConfig | None = chz.field(
        default=None, doc="How tokens come to experts on other ranks; none: all_to_all. A role's own setting goes before it."
    )

    # Vision towers (roles/media.py).
    vision: str = chz.field(
        default="whole",
        doc="How ranks of cp and tp, which hold parts of the same rows, run a vision tower: whole (each runs all images of its rows), shared (each runs its share of the frames, and "
        "features are gathered), or balanced (the frames of all data-parallel ranks are dealt out over all ranks of the pipeline stage, so that none waits for the one with the most images).",
    )

    # Pipeline stages.
    stages: tuple[str, ...] | None = chz.field(
        default=None,
        doc="Names of the blocks with which a pipeline stage begins (the first block may be left out); none: cut so that the costliest stage is as cheap as can be.",
    )

    @chz.validate
    def _vision_is_known(self) -> None:
        if self.vision not in VISION:
            raise UsageError(f"parallel.vision is {self.vision!r}. {did_you_mean(self.vision, VISION)}")


# ---------------------------------------------------------------- roles


@chz.chz(typecheck=True)
class ColumnConfig(RoleConfig):
    """Y = X W^T with W cut on its outputs."""

    gather: bool = chz.field(default=False, doc="Gather the sequence at its own entry: for a projection outside of any region.")
    unit: int = chz.field(default=1, doc="Outputs that stay together: cuts lie at multiples of it.")

    @chz.validate
    def _fits(self) -> None:
        check_between("column.unit", self.unit, 1)


@chz.chz(typecheck=True)
class RowConfig(RoleConfig):
    """Y = X W^T with W cut on its inputs."""

    unit: int = chz.field(default=1, doc="Inputs that stay together: cuts lie at multiples of it, as in the columns before it.")

    @chz.validate
    def _fits(self) -> None:
        check_between("row.unit", self.unit, 1)


@chz.chz(typecheck=True)
class VocabConfig(RoleConfig):
    """An embedding or an output projection cut on the vocabulary."""

    whole: bool = chz.field(
        default=False, doc="Keep the whole vocabulary on every rank, which then works on its own tokens: for small vocabularies."
    )


@chz.chz(typecheck=True)
class RegionConfig(RoleConfig):
    """Gathers the sequence at the entry."""

    inputs: int = chz.field(default=1, doc="How many of the leading arguments are activations cut along the sequence.")

    @chz.validate
    def _fits(self) -> None:
        check_between("region.inputs", self.inputs, 1)


@chz.chz(typecheck=True)
class AttentionHeadsConfig(RoleConfig):
    """Attention cut by whole heads."""

    gather: bool = chz.field(
        default=True,
        doc="Gather the sequence at the entry. False: projections inside gather for themselves (`sequence` with gather, `column` with gather).",
    )
    queries: str = chz.field(default="wq", doc="The projection whose outputs are the query heads.")
    keys_values: tuple[str, ...] = chz.field(
        default=("wk", "wv"),
        doc="Projections of key/value heads: whole on every rank, and sliced, where the ranks cannot share the heads out.",
    )
    head_dim: str = chz.field(default="head_dim", doc="The module's attribute that is the width of a query head.")
    kv_head_dim: str = chz.field(default="head_dim", doc="The module's attribute that is the width of a key/value head.")
    per_head: tuple[str, ...] = chz.field(default=("sinks",), doc="Parameters with one row for each query head, cut with the heads.")
    per_kv_head: tuple[str, ...] = chz.field(default=(), doc="Parameters with one row for each key/value head.")


@chz.chz(typecheck=True)
class SequenceConfig(RoleConfig):
    """Works on the own part of the sequence."""

    gather: bool = chz.field(
        default=False,
        doc="Gather the result along the sequence: for a narrow projection whose readers see all tokens (low-rank queries, latents).",
    )


@chz.chz(typecheck=True)
class ReplicatedConfig(RoleConfig):
    """Sees all tokens with whole parameters."""

    inputs: int = chz.field(
        default=1, doc="How many of the leading arguments are activations cut along the sequence; 0 for what reads the batch alone."
    )

    @chz.validate
    def _fits(self) -> None:
        check_between("replicated.inputs", self.inputs, 0)
