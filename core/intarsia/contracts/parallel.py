"""How a model that is written for one device runs on a mesh: what a paralleliser is, and the roles that it gives to modules. Torch-free at import.

Between modules activations are [B, S, ...], cut along S: over `cp`, then over `tp` (contiguous, as even as can be, empty parts are ordinary). Every rank
computes its own tokens only, so that every parameter's gradient is a partial sum over all of dp_replicate, dp_shard, cp and tp along which the
parameter is not cut (expert-cut ones: over ep_shard in the place of the last three); the sharder sums them, once and all alike. Inside a region (attention, feed-forward) the tp ranks see all
tokens of the cp part. Losses and metrics are sums, partial over pp, dp and cp and equal along tp. Ranks without tokens take part in every collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn

    from intarsia.comm import Communicator
    from intarsia.config import Recipe
    from intarsia.contracts.data import Batch
    from intarsia.contracts.placement import Placement
    from intarsia.contracts.sequence import SequenceContext
    from intarsia.mesh import Mesh
    from intarsia.parameters import ParameterTable


@dataclasses.dataclass(frozen=True, slots=True)
class StagePart:
    """One stage of a pipeline: number `index` of all, the model's entry where `first`, its exit and the loss where `last`. Stability: provisional."""

    index: int
    first: bool
    last: bool
    blocks: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PipelinePart:
    """This rank's part of a pipeline of `ranks` ranks: one stage for each virtual stage, in execution order. Stability: provisional."""

    stages: tuple[StagePart, ...]
    ranks: int


class Parallel(Protocol):
    """A model that a paralleliser has made ready for its mesh, as engines see it. Stability: provisional."""

    part: PipelinePart | None
    """None where the whole model is here."""

    def local(self, batch: Batch) -> Batch:
        """This rank's context-parallel part of a micro-batch; the batch itself without context parallelism."""

    def context(self, batch: Batch, windows: Sequence[int | None]) -> SequenceContext | None:
        """The context for a local batch; None: the engine's own. `windows` are the attention windows that the model's mixers declare."""


@runtime_checkable
class Paralleliser(Protocol):
    """Built by `target(config)`. Stability: provisional."""

    def apply(self, model: nn.Module, table: ParameterTable, mesh: Mesh, recipe: Recipe, sharding: Any) -> Parallel:
        """Cut the model, which is on the meta device, for its place in the mesh: after `table` was read from it and before the sharder. Parameters that are cut get their local
        shape and `ParameterInfo.outer`; modules of other pipeline stages become None, their parameters leave the table (`ParameterTable.keep`).
        `sharding` is the family's sharding table (`ModelEntry.sharding`) or None: rows (module pattern, role) or (pattern, role, {setting: value}), `*` standing
        for one dotted part. Raises UsageError, with numbers and nearest legal values, before anything is cut."""


@runtime_checkable
class Role(Protocol):
    """What a module does on a mesh. Built by `target(config)`. `sizes` are the mesh's axes'. Stability: provisional.

    Optional, read by the paralleliser `declared` where they are there: `is_region` and `ends_region` (True for roles that gather all tokens at a module's entry, and that
    sum at its end), `gathers_all` (for one that gathers and cuts again by itself), `overrules(name, module)` (parameters of modules inside whose own rows have no say),
    `prepare(config, recipe)` (the paralleliser's settings, before `apply`), `cross_entropy(name, module, groups)` and `token_log_probs(name, module, groups)` (what the model's
    become where the module has the head weight). `intarsia_testing.RoleConformance` proves the promises.
    """

    def check(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> None:
        """Raise UsageError, with the numbers and the nearest legal values, where the module cannot be cut so. Called for all modules before any is cut."""

    def cut(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> Mapping[str, tuple[str, Placement]]:
        """Parameter name within the module to (mesh axis, placement), for those that are cut."""

    def apply(self, name: str, module: nn.Module, groups: Callable[..., Communicator]) -> None:
        """Wrap `module.forward`. `groups("tp")` is the group of a mesh axis."""
