"""Losses, optimizers, schedules, sharders, engines and metric sinks, as the Trainer uses them. Torch-free at import."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from intarsia.comm import Communicator
    from intarsia.contracts.data import Batch
    from intarsia.contracts.model import Model
    from intarsia.mesh import Mesh
    from intarsia.parameters import ParameterTable


@dataclasses.dataclass
class LossSum:
    """A loss as sums: `total` (scalar tensor with grad, the sum over counted tokens) and `sums` of further metrics (detached scalars). Stability: stable.

    The trainer divides once by the global number of counted tokens. A batch without a counted token gives 0 that still has a gradient.
    """

    total: Tensor
    sums: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Loss(Protocol):
    """Built by `target(config)`. Stability: stable."""

    def __call__(self, model: Model, hidden_BSD: Tensor, batch: Batch) -> LossSum:
        """The summed loss of one micro-batch."""

    def count(self, batch: Batch) -> int:
        """What this batch adds to the global divisor (tokens that are trained on), known before the forward pass."""


@dataclasses.dataclass
class OptimizerGroup:
    """Parameters that share settings. `parameters` maps canonical names to local parameters (shards); `options` override the config's fields. Stability: provisional."""

    name: str
    parameters: dict[str, nn.Parameter]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Optimizer(Protocol):
    """Built by `target(config, groups, table, comm)` where table is the ParameterTable and comm the Communicator. Stability: provisional."""

    def step(self, factor: float | Tensor, names: Collection[str] | None = None) -> None:
        """One update from the parameters' `.grad`; each group's learning rate is its own times `factor` (a 0-d tensor on the parameters' device where the
        step is captured). Parameters whose grad is None are skipped. `names`: only these (canonical); within a step the sharder calls it for disjoint sets
        that cover all, the same ones on every rank and in every step.

        An optimizer that updates split masters (`ParameterInfo.low`) has an attribute `updates_split_masters` that is True. One that has more to say of how
        it works has a method `facts() -> Mapping[str, Any]` of JSON values, which are recorded with the build.
        """

    def learning_rates(self) -> Mapping[str, float]:
        """Base learning rate of each group by name."""

    def slots(self) -> Mapping[str, Mapping[str, Tensor]]:
        """For every parameter the state tensors by slot name, created if need be (so that loading finds them): elements correspond to those of the
        local parameter, or the tensor is a scalar that is equal on all ranks."""


@runtime_checkable
class Schedule(Protocol):
    """A learning-rate schedule, built by `target(config)`. Stability: stable."""

    def factor(self, step: int, steps: int) -> float:
        """The factor for optimizer step `step` (0-based) of `steps`. Pure."""


@runtime_checkable
class ShardedModel(Protocol):
    """A model whose parameters are kept as shards by a Sharder. Stability: provisional."""

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Canonical name to the local parameter that the optimizer updates (float32 master where the policy says so; the high half of a split one, whose
        low half is `ParameterInfo.low`). On a rank that holds nothing of a parameter it has zero elements."""

    def set_last_micro_batch(self, last: bool) -> None:
        """Whether the next backward is the step's last: gradients are reduced then, accumulated without communication before."""

    def finish_gradients(self) -> None:
        """After the last backward: every `.grad` of `parameters()` holds the global sum's local part, also for parameters that got none on this rank."""

    def update(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        """Let the optimizer update all masters, in one `step` or in several by names, and make stale what was gathered from them. A collective."""

    def zero_gradients(self) -> None:
        """Forget all gradients."""

    def after_update(self) -> None:
        """The local parameters have changed otherwise than by `update` (they were loaded, say): whatever was gathered or cast from them is stale."""

    def masters(self) -> Mapping[str, Tensor]:
        """Canonical name to the local part of the master, to save: the storage that `parameters()` has, or a float32 copy where masters are split."""

    def load_masters(self, values: Mapping[str, Tensor]) -> None:
        """Take back what `masters` gave and somebody has written into; names that are missing keep their values. Nothing to do for live storages."""

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The named modules that were sharded."""


@runtime_checkable
class Sharder(Protocol):
    """Built by `target(config)`. Stability: provisional.

    One whose parameters need not compute in `table.compute` has a method `compute_dtypes(model, table) -> Mapping[str, str]`: by canonical name the dtype in which a
    parameter is computed with, of a whole model that need not be sharded.
    """

    def shard(self, model: nn.Module, table: ParameterTable, mesh: Mesh, comm: Communicator) -> ShardedModel:
        """Take over the parameters of a model on the meta device or materialised: cut them by placements, record each one's Layout in `table`, allocate only the
        local part on `mesh.device`, fill it with `table.fill`, and install what unshards and reduces during forward and backward."""


@runtime_checkable
class Engine(Protocol):
    """Runs forward and backward. Built by `target(config, model, loss, recipe, parallel)`; `parallel` is what a `Paralleliser` made of the model, or None.
    Stability: provisional.

    For every batch it adds the following tokens where the model predicts further ahead, takes this rank's part (`parallel.local`), makes the context, and runs
    forward, loss and backward inside `intarsia.logical.micro_batch`, whose sums join the loss's. Every rank of the mesh calls every method alike.
    """

    def run(self, batches: Sequence[Batch], scale: float, sharded: ShardedModel) -> list[LossSum]:
        """All micro-batches of a step, on the device: forward, loss, and backward of `total * scale`. Says by `sharded.set_last_micro_batch` which is the
        last, and leaves `finish_gradients` to the caller. Returns detached sums, this rank's share: along tp every rank returns the same."""

    def evaluate(self, batch: Batch) -> LossSum:
        """Forward and loss without gradients."""

    def explain_not_finite(self, batches: Sequence[Batch], scale: float, sharded: ShardedModel, world: Communicator) -> str:
        """A sentence, the same on every rank, about what is not finite first in this step: which module, where, on which rank, in which micro-batch. Runs
        the micro-batches again, so that gradients of parameters change. A collective."""


@runtime_checkable
class MetricSink(Protocol):
    """Built by `target(config, run_directory)`; lives on rank 0. Stability: stable."""

    def write(self, event: Mapping[str, Any]) -> None:
        """One event of `events.jsonl` (documented schema)."""

    def close(self) -> None:
        """The run has ended."""
