"""What `flexshard_gpu.py` races: PyTorch's `fully_shard` in two wrappings, FlexShard over the process group or a transport, and FlexShard's captured step.

Every variant has `step(batch) -> loss` (forward, backward, update, gradients forgotten), and starts from the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from flexshard_model import DeviceTable, Llama, Size, initial_values, rotary_tables
from intarsia.comm import Communicator
from intarsia.config import MeshConfig
from intarsia.contracts import OptimizerGroup
from intarsia.layout import region_numel
from intarsia.mesh import Mesh, check_mesh
from intarsia.plugins import current
from intarsia_flexshard.config import BucketConfig, FlexShardConfig
from intarsia_flexshard.runtime import build as build_flexshard
from intarsia_optimizers.config import AdamWConfig
from intarsia_placements.config import Flat, Owned
from torch import Tensor

Batch = tuple[Tensor, Tensor]

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclasses.dataclass
class Setup:
    """What all variants of a section share. `alone` is the mesh of one process over this device; `changes` overrides fields of FlexShardConfig; `offload` is that of embedding and head. `early` lets FlexShard's
    backward update each bucket behind its reduction, which keeps no gradients."""

    size: Size
    world: Communicator
    alone: Communicator
    compiled: bool
    lr: float = ADAMW["lr"]
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    early: bool = False
    offload: str = "low"

    @property
    def device(self) -> torch.device:
        """This process's."""
        return self.world.device


class Variant(Protocol):
    """Something that trains."""

    symmetric_bytes: int

    def step(self, batch: Batch) -> Tensor:
        """One step; the loss of this process's batch."""


def install_kernels(compiled: bool) -> dict[str, dict[str, str]]:
    """Choose what multiplies by weights on this device, float8 and others, and nothing else; the choices. To the opponent's weights the second is torch's own product."""
    from intarsia import device, ops

    selection = ops.select(
        {"*": "reference", "scaled_linear": "auto", "linear": "placed"}, current(), device.capabilities(), "bfloat16", compiled=compiled
    )
    ops.install(selection)
    return {name: selection.facts()[name] for name in ("linear", "scaled_linear")}


def compile_parts(model: Llama) -> None:
    """Compile each block and the loss. The modules' own calls, with a sharder's hooks, stay as they are."""
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    model.head.loss = torch.compile(model.head.loss, dynamic=False)


# ---------------------------------------------------------------- the opponent


@functools.cache
def device_mesh(device_type: str, size: int, alone: bool) -> Any:
    """All processes over the default group, or this one alone. Made once: each mesh of its own has communicators of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    if not alone:
        return init_device_mesh(device_type, (size,))
    return init_device_mesh(device_type, (size, 1), mesh_dim_names=("all", "alone"))["alone"]


class FullyShard:
    """`torch.distributed.fsdp.fully_shard`: bfloat16 compute, float32 reduction, fused AdamW.

    `best` wraps embedding, blocks and head apart and keeps the head from forward to backward; else each block and the model are wrapped.
    """

    symmetric_bytes = 0

    def __init__(self, setup: Setup, best: bool, alone: bool = False) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        device = setup.device
        mesh = device_mesh(device.type, setup.world.size, alone)
        with torch.device("meta"):
            self.model = Llama(setup.size)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        if setup.compiled:
            compile_parts(self.model)
        for block in self.model.blocks:
            fully_shard(block, **options)
        if best:
            fully_shard(self.model.embedding, **options)
            fully_shard(self.model.head, reshard_after_forward=False, **options)
        fully_shard(self.model, **options)
        self.model.to_empty(device=device)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parts = initial_values(name, parameter.shape, device).chunk(mesh.size())
                parameter.to_local().copy_(parts[mesh.get_local_rank()])  # type: ignore[attr-defined]
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **{**ADAMW, "lr": setup.lr}, fused=fused)
        self.tables = rotary_tables(setup.size, device, torch.bfloat16)

    def step(self, batch: Batch) -> Tensor:
        """See `Variant.step`."""
        loss = self.model(*batch, *self.tables)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def opponent_settings(compiled: bool) -> dict[str, Any]:
    """What the opponent ran with, for the record."""
    return {
        "runtime": "torch.distributed.fsdp.fully_shard",
        "plain": "each block, the model; reshard_after_forward default",
        "best": "embedding, each block, head (norm, projection, loss); reshard_after_forward=False for the head, default elsewhere",
        "mixed_precision": "MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)",
        "optimizer": f"torch.optim.AdamW(fused=True on CUDA, {', '.join(f'{key}={value}' for key, value in ADAMW.items())})",
        "compile": "torch.compile(dynamic=False) of each block's forward and of the loss" if compiled else "none",
        "rotary_tables": "bfloat16",
    }


# ---------------------------------------------------------------- ours


def flexshard_config(setup: Setup, transport: str | None, payload: str, owned: bool = False) -> FlexShardConfig:
    """Flat cuts, split masters, embedding and head apart, the vectors of all blocks in one bucket that stays whole, the matrices of each block in one.

    `owned` keeps every matrix of a block whole on one rank instead.
    """
    plugins = current()
    chosen = None if transport is None else plugins.config_class(plugins.registry("transport").find(transport))()
    plain = "plain" if payload != "plain" else None
    values: dict[str, Any] = {
        "placement": Owned() if owned else Flat(),
        "buckets": (
            BucketConfig(name="embedding", match=("embedding",), placement=Flat(), payload=plain, offload=setup.offload),
            BucketConfig(name="vectors", match=("*norm.weight",), placement=Flat(), reshard="never", payload=plain),
            BucketConfig(name="head", match=("head.weight",), placement=Flat(), payload=plain, offload=setup.offload),
        ),
        "master": "split",
        # The loss is each process's own mean: what fully_shard averages is averaged here.
        "reduce_op": "average",
        "payload": payload,
        "transport": chosen,
    }
    return FlexShardConfig(**{**values, **setup.changes})


class Ours:
    """FlexShard: bfloat16 compute, gradients on the wire in bfloat16 and summed in float32, AdamW of `intarsia_optimizers`."""

    def __init__(
        self, setup: Setup, transport: str | None = None, payload: str = "plain", alone: bool = False, owned: bool = False, seed: int = 0
    ) -> None:
        self.comm = comm = setup.alone if alone else setup.world
        config = flexshard_config(setup, transport, payload, owned)
        self.early = setup.early
        self.kernels = install_kernels(setup.compiled)
        self.settings = repr(config) + (", updated in backward" if setup.early else "") + f", kernels {self.kernels}"
        self.factor: float | Tensor = 1.0
        with torch.device("meta"):
            self.model = Llama(setup.size)
        self.table = DeviceTable.from_model(self.model, "float32", "bfloat16", "float32", seed=seed)
        mesh = Mesh(check_mesh(MeshConfig(), comm.size), comm)
        self.sharded = build_flexshard(config).shard(self.model, self.table, mesh, comm)
        if setup.compiled:
            compile_parts(self.model)
        settings = AdamWConfig(**{**ADAMW, "lr": setup.lr}, decay_vectors=True)
        group = OptimizerGroup("all", {name: parameter for name, parameter in self.sharded.parameters().items() if parameter.requires_grad})
        self.optimizer = current().build(settings, [group], self.table, comm)
        self.tables = rotary_tables(setup.size, setup.device, torch.bfloat16)

    @property
    def symmetric_bytes(self) -> int:
        """Device memory that the allocator does not see."""
        transports = {id(comm.transport): comm.transport for comm in self.communicators() if comm.transport is not None}
        return sum(transport.bytes_allocated for transport in transports.values())

    def communicators(self) -> list[Communicator]:
        """All that buckets use."""
        groups = [bucket.groups for bucket in self.sharded.buckets]
        return list(dict.fromkeys(comm for each in groups for comm in (each.gather, each.reduce, each.replicas)))

    def step(self, batch: Batch) -> Tensor:
        """See `Variant.step`."""
        with self.sharded.update_in_backward(self.optimizer, self.factor) if self.early else contextlib.nullcontext():
            loss = self.model(*batch, *self.tables)
            loss.backward()
            self.sharded.finish_gradients(wait=False)
        self.sharded.update(self.optimizer, self.factor)
        self.sharded.zero_gradients()
        return loss.detach()

    def traffic(self) -> dict[str, dict[str, int]]:
        """Calls and received bytes so far by what, of all this variant's communicators."""
        found: dict[str, dict[str, int]] = {}
        for comm in self.communicators():
            for what, statistic in comm.stats().items():
                entry = found.setdefault(what, {"calls": 0, "bytes": 0})
                entry["calls"] += statistic.calls
                entry["bytes"] += statistic.bytes
        return found

    def true_bytes(self) -> dict[str, int]:
        """What one gather and one reduction of each bucket must bring to this rank: the others' elements, and their parts of its own."""
        found = {}
        for bucket in self.sharded.buckets:
            layouts = [(info, info.layout) for info in bucket.infos if info.layout is not None]
            own = sum(region_numel(layout.local(self.table.rank_in(layout))) for _, layout in layouts)
            whole = sum(math.prod(info.shape) for info, _ in layouts)
            found[f"unshard {bucket.name}"] = (whole - own) * bucket.compute_dtype.itemsize
            found[f"reduce {bucket.name}"] = own * (bucket.groups.reduce.size - 1) * bucket.compute_dtype.itemsize
        return found


class Captured:
    """The whole step of `Ours` as one CUDA graph. The learning rate's factor is a tensor, as a schedule needs it."""

    def __init__(self, inner: Ours, batch: Batch) -> None:
        from intarsia_flexshard.capture import CapturedStep

        self.inner = inner
        inner.factor = torch.ones((), device=inner.comm.device)
        self.replay = CapturedStep(inner.sharded, lambda *inputs: inner.step(inputs), batch)

    @property
    def symmetric_bytes(self) -> int:
        """See `Ours.symmetric_bytes`."""
        return self.inner.symmetric_bytes

    def step(self, batch: Batch) -> Tensor:
        """See `Variant.step`."""
        return self.replay(*batch)
