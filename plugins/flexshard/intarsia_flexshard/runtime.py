"""FlexShard's first form: buckets driven by module hooks.

A block's bucket is unsharded before its forward and released after it; unsharded again when the backward pass enters the block, reduced (in the step's last
micro-batch) and released when it leaves. The root bucket (what is in no block, ties between blocks included) stays whole from the model's forward to the end of
the backward pass, since losses read the head outside of `forward`.

Every collective is triggered by a module call or by the backward pass entering or leaving one, never by which parameters got gradients: ranks that run the
same modules make the same calls in the same order, whatever their data does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.contracts import Member, Placement
from intarsia.errors import PluginError, UsageError, did_you_mean
from intarsia.layout import build_layouts
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterInfo, ParameterTable, materialise_buffers
from intarsia.plugins import current
from torch import Tensor, nn

from intarsia_flexshard.bucket import Bucket
from intarsia_flexshard.config import FlexShardConfig

RESHARD = ("always", "never")


def build(config: FlexShardConfig) -> FlexShard:
    """The entry's target."""
    return FlexShard(config, current().build(config.placement))


class FlexShard:
    """See `intarsia.contracts.Sharder`."""

    def __init__(self, config: FlexShardConfig, placement: Placement) -> None:
        if config.reshard not in RESHARD:
            raise UsageError(f"sharder.reshard is {config.reshard!r}. {did_you_mean(config.reshard, RESHARD)}")
        self.config, self.placement = config, placement

    def shard(self, model: nn.Module, table: ParameterTable, mesh: Mesh, comm: Communicator) -> FlexShardModel:
        """Cut each bucket by the placement over dp_shard, with replicas over dp_replicate; fill the shards; replace the model's parameters; install the hooks."""
        table.mesh = mesh
        shards, replicas = mesh.comm("dp_shard"), mesh.comm("dp_replicate")
        members: dict[str, list[ParameterInfo]] = {}
        for info in table.values():
            members.setdefault(info.block, []).append(info)
        # The order of blocks is the order of execution, the root comes first.
        order = [block for block in ("", *model.regions().blocks) if block in members]  # type: ignore[operator]
        buckets = {block: self._bucket(block or "root", members[block], table, mesh, shards, replicas) for block in order}
        for bucket in buckets.values():
            for name, master in bucket.masters.items():
                layout = table[name].layout
                assert layout is not None
                table.fill(name, layout.local(table.rank_in(layout)), master)
        modules = dict(model.named_modules(remove_duplicate=False))
        for bucket in buckets.values():
            for info in bucket.infos:
                for alias in (info.name, *info.aliases):
                    owner, _, attribute = alias.rpartition(".")
                    setattr(modules[owner], attribute, bucket.whole[info.name])
        materialise_buffers(model, mesh.device, table.seed)
        # Also a meeting: no rank gathers before every rank's shards are filled.
        comm.agree([bucket.facts() for bucket in buckets.values()], "the bucket plan")
        return FlexShardModel(model, table, {modules[block]: bucket for block, bucket in buckets.items()}, self.config.reshard == "always")

    def _bucket(
        self, name: str, infos: list[ParameterInfo], table: ParameterTable, mesh: Mesh, shards: Communicator, replicas: Communicator
    ) -> Bucket:
        steps: list[Any] = [("dp_replicate", replicas.size, "replicate"), ("dp_shard", shards.size, self.placement)]
        layouts = build_layouts([Member(info.name, info.shape, table.dtype) for info in infos], [step for step in steps if step[1] > 1])
        for info in infos:
            info.layout, info.bucket = layouts[info.name], name
        return Bucket(name, infos, table, shards, replicas, self.config.debug)


class FlexShardModel:
    """See `intarsia.contracts.ShardedModel`."""

    def __init__(self, model: nn.Module, table: ParameterTable, buckets: dict[nn.Module, Bucket], reshard: bool) -> None:
        self._model, self._buckets, self._reshard = model, buckets, reshard
        self._last, self._epoch = True, 0
        masters = {name: master for bucket in buckets.values() for name, master in bucket.masters.items()}
        self._parameters = {name: masters[name] for name in table}
        for module, bucket in buckets.items():
            for member, (info, parameter) in enumerate(zip(bucket.infos, bucket.whole.values(), strict=True)):
                if info.trainable:
                    parameter.register_post_accumulate_grad_hook(_taker(bucket, member))
            module.register_forward_pre_hook(self._before_forward(bucket, module is model), with_kwargs=True)
            module.register_forward_hook(self._after_forward(bucket, module is model), with_kwargs=True)

    # ------------------------------------------------------------ the contract

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Master shards by canonical name, in the model's order."""
        return self._parameters

    def set_last_micro_batch(self, last: bool) -> None:
        """Whether buckets are reduced as the next backward pass leaves them."""
        self._last = last

    def finish_gradients(self) -> None:
        """Reduce what is left, last block first and the root at the end, and release everything."""
        for bucket in reversed(self._buckets.values()):
            if bucket.open:
                bucket.reduce()
            bucket.entered, bucket.calls = False, 0
            if self._reshard:
                bucket.release()
        self._last = True

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for bucket in self._buckets.values():
            bucket.forget()

    def after_update(self) -> None:
        """The masters have changed: what was gathered from them is released."""
        self._epoch += 1
        for bucket in self._buckets.values():
            bucket.release()

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The module of each bucket by the bucket's name."""
        for module, bucket in self._buckets.items():
            yield bucket.name, module

    # ------------------------------------------------------------ hooks

    def _before_forward(self, bucket: Bucket, is_root: bool) -> Callable[..., None]:
        @torch.compiler.disable
        def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
            recomputing = _in_backward()
            if not recomputing:
                bucket.entered = False
            bucket.unshard()
            inputs = (
                [] if is_root or not torch.is_grad_enabled() else [tensor for tensor in _tensors((args, kwargs)) if tensor.requires_grad]
            )
            if inputs:
                # Fires when the gradients of all inputs are known. Autograd runs later operations first, so the block's parameters have theirs by then.
                torch.autograd.graph.register_multi_grad_hook(inputs, lambda gradients: self._leave(bucket))
                # A recomputation replaces a call that was counted, or belongs to one that leaves once for each time it is run.
                bucket.calls += not recomputing

        return before_forward

    def _after_forward(self, bucket: Bucket, is_root: bool) -> Callable[..., None]:
        @torch.compiler.disable
        def after_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            epoch = self._epoch
            outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
            for tensor in outputs if torch.is_grad_enabled() else ():
                tensor.register_hook(lambda gradient: self._enter(bucket, epoch))
            # An output that hides its tensors could be entered unseen: then the parameters stay.
            hidden = torch.is_grad_enabled() and not outputs and any(info.trainable for info in bucket.infos)
            if self._reshard and not (is_root or hidden or bucket.entered):
                bucket.release()

        return after_forward

    def _enter(self, bucket: Bucket, epoch: int) -> None:
        """The backward pass has reached the block's output."""
        if epoch != self._epoch:
            raise PluginError(
                f"Bucket {bucket.name!r}: the parameters were updated between this forward pass and its backward pass, whose gradients would be wrong. "
                "Run backward before the optimizer steps."
            )
        bucket.entered = bucket.open = True
        bucket.unshard()

    def _leave(self, bucket: Bucket) -> None:
        """The backward pass has produced the gradients of one call's inputs."""
        bucket.calls = max(bucket.calls - 1, 0)
        if bucket.calls:
            return
        bucket.entered = False
        if self._last and bucket.open:
            bucket.reduce()
        if self._reshard:
            bucket.release()


def _taker(bucket: Bucket, member: int) -> Callable[[Tensor], None]:
    return lambda parameter: bucket.take(member, parameter)


def _in_backward() -> bool:
    """Whether autograd is running on this thread: a forward call then is a recomputation by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])
