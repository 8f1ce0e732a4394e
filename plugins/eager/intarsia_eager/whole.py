"""The sharder that does not shard: every process keeps the model's own parameters whole, in one dtype. With dp_replicate > 1 that is plain data
parallelism: gradients are summed over the replicas in one flat buffer after the last backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from intarsia.comm import Communicator
from intarsia.contracts import Optimizer
from intarsia.errors import UsageError
from intarsia.layout import Layout, whole_region
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterTable, materialise_buffers
from torch import Tensor, nn

from intarsia_eager.config import WholeConfig


def build(config: WholeConfig) -> Whole:
    """The entry's target."""
    return Whole()


class Whole:
    """See `intarsia.contracts.Sharder`."""

    def shard(self, model: nn.Module, table: ParameterTable, mesh: Mesh, comm: Communicator) -> WholeModel:
        """Give every parameter its storage and initial values on the mesh's device. The model's own Parameter objects are what the optimizer updates."""
        others = [f"{axis} {mesh.sizes[axis]}" for axis in ("pp", "cp", "tp", "ep") if mesh.sizes[axis] > 1]
        if others:
            raise UsageError(
                f"The sharder `whole` keeps every parameter on every process and sums gradients over replicas alone, but the mesh has {', '.join(others)}. "
                "Choose sharder=flexshard, which cuts and sums over all axes."
            )
        if mesh.sizes["dp_shard"] > 1:
            raise UsageError(
                f"The sharder `whole` keeps parameters whole, but mesh.dp_shard is {mesh.sizes['dp_shard']}. Choose sharder=flexshard, or "
                f"mesh.dp_shard=1 mesh.dp_replicate={mesh.data_ranks} for replicas."
            )
        if table.compute != table.dtype:
            raise UsageError(
                f"The sharder `whole` has one copy of each parameter, but precision.master is {table.dtype} and precision.compute {table.compute}. "
                "Choose sharder=flexshard, which keeps both."
            )
        table.mesh = mesh
        axes = [(axis, mesh.sizes[axis]) for axis in ("dp_replicate",) if mesh.sizes[axis] > 1]
        modules = dict(model.named_modules(remove_duplicate=False))
        for name, info in table.items():
            values = torch.empty(info.shape, dtype=getattr(torch, table.dtype), device=mesh.device)
            table.fill(name, whole_region(info.shape), values)
            parameter = nn.Parameter(values, requires_grad=info.trainable)
            for alias in (name, *info.aliases):
                owner, _, attribute = alias.rpartition(".")
                setattr(modules[owner], attribute, parameter)
            info.bucket = "whole"
            info.layout = Layout.whole(info.shape, table.dtype, axes)
        materialise_buffers(model, mesh.device, table.seed)
        return WholeModel(model, table, mesh.comm("dp_replicate"))


class WholeModel:
    """See `intarsia.contracts.ShardedModel`."""

    def __init__(self, model: nn.Module, table: ParameterTable, replicas: Communicator) -> None:
        self._model, self._replicas, self._reduce = model, replicas, getattr(torch, table.reduce)
        named = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = {name: named[name] for name in table}
        self._trained = [self._parameters[name] for name, info in table.items() if info.trainable]

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The model's own parameters by canonical name."""
        return self._parameters

    def set_last_micro_batch(self, last: bool) -> None:
        """Nothing to do: gradients are reduced in `finish_gradients` only."""

    def finish_gradients(self) -> None:
        """Sum over the replicas. A parameter that got no gradient contributes zeros, so that every rank joins."""
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._replicas.size == 1 or not self._trained:
            return
        buffer = torch.cat([parameter.grad.reshape(-1).to(self._reduce) for parameter in self._trained])  # type: ignore[union-attr]
        self._replicas.all_reduce(buffer, "sum", "reduce whole")
        for parameter, part in zip(self._trained, buffer.split([parameter.numel() for parameter in self._trained]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))  # type: ignore[union-attr]

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for parameter in self._trained:
            parameter.grad = None

    def update(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        """One step over everything."""
        optimizer.step(factor)

    def after_update(self) -> None:
        """Nothing was gathered or cast."""

    def masters(self) -> Mapping[str, Tensor]:
        """The parameters themselves."""
        return self._parameters

    def load_masters(self, values: Mapping[str, Tensor]) -> None:
        """They are in place."""

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The model."""
        yield "", self._model
