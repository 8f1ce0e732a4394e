"""What a run is made of while it is alive: the trainer's own view of `Run.parts`, typed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from intarsia.device import on_device

if TYPE_CHECKING:
    import torch
    from torch import nn

    from intarsia.checkpoint import CheckpointManager
    from intarsia.comm import Communicator
    from intarsia.config import Resolved
    from intarsia.contracts import Batch, Engine, Loader, Loss, Optimizer, Parallel, Run, Schedule, ShardedModel, Stateful, StepState
    from intarsia.hooks import Hooks
    from intarsia.mesh import Mesh
    from intarsia.parameters import ParameterTable
    from intarsia.plugins import Plugins
    from intarsia.train.events import EventLog
    from intarsia.train.state import Progress, RandomState

# Mesh axes whose ranks see different rows.
DATA_AXES = ("dp_replicate", "dp_shard")


@dataclasses.dataclass
class Built:
    """Filled stage by stage; a field is there from its stage on. `events` is None on ranks other than 0."""

    run: Run
    resolved: Resolved
    plugins: Plugins
    hooks: Hooks
    world: Communicator
    device: torch.device
    events: EventLog | None = None
    mesh: Mesh = dataclasses.field(init=False)
    data: Communicator = dataclasses.field(init=False)
    loader: Loader = dataclasses.field(init=False)
    evaluation: Loader | None = None
    model: nn.Module = dataclasses.field(init=False)
    table: ParameterTable = dataclasses.field(init=False)
    sharded: ShardedModel = dataclasses.field(init=False)
    optimizer: Optimizer = dataclasses.field(init=False)
    schedule: Schedule = dataclasses.field(init=False)
    loss: Loss = dataclasses.field(init=False)
    engine: Engine = dataclasses.field(init=False)
    parallel: Parallel | None = None
    step_states: list[StepState] = dataclasses.field(default_factory=list)
    manager: CheckpointManager = dataclasses.field(init=False)
    progress: Progress = dataclasses.field(init=False)
    random: RandomState = dataclasses.field(init=False)
    components: Sequence[Stateful] = ()
    flops_per_token: float = 0.0

    def event(self, name: str, **fields: object) -> None:
        """Write an event, on rank 0."""
        if self.events is not None:
            self.events.write(name, **fields)

    def warn(self, message: str) -> None:
        """A warning event, on rank 0."""
        self.event("warning", message=message)

    def on_device(self, batch: Batch) -> Batch:
        """The batch with its tensors on the run's device."""
        return on_device(batch, self.device)
