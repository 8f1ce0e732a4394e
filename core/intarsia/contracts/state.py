"""Everything that a checkpoint holds is a StateItem. Torch-free at import."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from intarsia.layout import Layout

StateKind = Literal["tensor", "replicated", "keyed", "rank"]


@dataclasses.dataclass(frozen=True, slots=True)
class StateItem:
    """One named piece of state of one owner. Stability: stable.

    * `tensor`: `value` is this rank's local torch tensor (its storage holds the layout's local region in storage order; the shape
      may be the local box's or flat), `layout` says which part of the global tensor it is. Only primaries are written.
    * `replicated`: `value` is JSON or a tensor, equal on all ranks, or on all of the pipeline stages that have it; equality is checked at save.
    * `keyed`: `value` is a JSON object; the objects of all ranks are merged by key (equal keys must agree) and each rank
      gets the whole merged object back. Keys are global, never ranks.
    * `rank`: `value` is JSON or a tensor of this rank alone (random-generator state); exact on the same mesh, elsewhere the owner is told that it
      is missing and rederives with a warning.

    `name` is unique within `owner` (a component's dotted name, `model`, `optimizer`, `data`, or a distribution's name). `version` is the
    schema's, handed to `migrate` when it differs. Items may differ from pipeline stage to pipeline stage. `is_copy`: another stage has this tensor too and writes
    it; loading fills both.
    """

    owner: str
    name: str
    kind: StateKind
    value: Any
    layout: Layout | None = None
    version: int = 1
    is_copy: bool = False

    @property
    def key(self) -> str:
        """`owner/name`, the item's name in a manifest."""
        return f"{self.owner}/{self.name}"


@runtime_checkable
class Stateful(Protocol):
    """A component with state. Stability: stable."""

    def state(self) -> list[StateItem]:
        """The state now. Tensors may alias live storage: the saver copies them before it returns."""

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """Take loaded values by item name. Tensor items were already copied into the storages that `state()` gave and are in
        `values` as those tensors; the others must be taken here. `missing_rank_state` says that `rank` items are absent since the mesh differs."""


@runtime_checkable
class Migrates(Protocol):
    """A Stateful that reads older schema versions. Stability: provisional."""

    def migrate(self, name: str, version: int, value: Any) -> Any:
        """`value` of item `name` at the current version, from an older one."""


@runtime_checkable
class StepState(Protocol):
    """State that changes with training once per optimizer step, whatever accumulation or recomputation does (router counts and biases). Stability: provisional."""

    def reduce(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Combine what this step's micro-batches counted over all ranks, before the event `before_update`. The argument sums a tensor over the
        ranks that have the same module (those of one pipeline stage), in place; each of them calls it equally often."""

    def commit(self) -> None:
        """Apply it, once, after the optimizer step, and count anew."""


@runtime_checkable
class Evaluates(Protocol):
    """A StepState whose passes put off what an evaluation must not leave unsaid. Stability: provisional."""

    def evaluated(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Raise it, at the end of each evaluation: once, on every rank, with the argument of `StepState.reduce`."""
