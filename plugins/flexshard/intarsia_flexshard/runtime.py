"""FlexShard: what happens to buckets when.

A bucket is unsharded before the forward of a module that needs it and given back afterwards; unsharded again when the backward pass enters the module, reduced
when it leaves. Gathers start ahead of their use, both ways, as many buckets as the sharder's `prefetch` says. The root bucket (driven by the model itself) stays whole to the step's
end, since losses read the head outside of `forward`.

Every collective is triggered by a module call, by the backward pass entering or leaving one, or by an explicit call, never by which parameters got gradients: ranks that run
the same modules make the same calls in the same order, whatever their data does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.contracts import Optimizer
from intarsia.errors import DistributedError, PluginError, UsageError, did_you_mean
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterTable, materialise_buffers
from intarsia.plugins import Plugins, current
from torch import Tensor, nn

from intarsia_flexshard.assign import assign, compute_dtypes, kept_wide, names_here, read_outside
from intarsia_flexshard.bucket import Bucket, balanced
from intarsia_flexshard.config import FlexShardConfig
from intarsia_flexshard.copies import Copies, matched_elsewhere
from intarsia_flexshard.gathers import Gathers, needs_weights
from intarsia_flexshard.groups import make_groups
from intarsia_flexshard.guards import Places, check_values, refuse_copies
from intarsia_flexshard.hooks import Call, Inputs, differentiable, handled, in_backward, untraced, when_known
from intarsia_flexshard.lanes import Lanes
from intarsia_flexshard.parameters import check_fresh, check_masters, check_torch, read_in_forward, running, take_place
from intarsia_flexshard.payload import step_quantising
from intarsia_flexshard.placing import Placing
from intarsia_flexshard.reduction import Reduction
from intarsia_flexshard.wire import check_quantisation

# Reductions under way before the oldest is waited for: it bounds what gradients in flight take.
PENDING = 2

# Steps after which each bucket's collectives are recorded as graphs: the first ones set up the groups and the buffers.
RECORDED_AFTER = 2


def build(config: FlexShardConfig) -> FlexShard:
    """The entry's target."""
    return FlexShard(config, current())


class FlexShard:
    """See `intarsia.contracts.Sharder`."""

    def __init__(self, config: FlexShardConfig, plugins: Plugins) -> None:
        self.config, self._plugins = config, plugins

    def compute_dtypes(self, model: nn.Module, table: ParameterTable) -> Mapping[str, str]:
        """See `intarsia.contracts.Sharder`."""
        return compute_dtypes(self.config, table.values(), table.compute, kept_wide(model))

    def shard(self, model: nn.Module, table: ParameterTable, mesh: Mesh, comm: Communicator) -> FlexShardModel:
        """Cut each bucket by its placement over its axes; fill the shards; replace the model's parameters; install the hooks."""
        check_torch()
        check_fresh(model)
        config, table.mesh = self.config, mesh
        modules = dict(model.named_modules(remove_duplicate=False))
        blocks = list(model.regions().blocks)  # type: ignore[operator]
        outside, elsewhere = read_outside(model), matched_elsewhere(config, table, mesh)
        dtypes = table.compute, table.reduce
        specs = assign(config, table.values(), blocks, running(modules), *dtypes, outside, mesh.sizes, elsewhere, kept_wide(model))
        check_quantisation(config.tile, config.scales)
        readers = read_in_forward(table, modules, outside)
        groups = make_groups(specs, mesh, None if config.transport is None else self._plugins.build(config.transport))
        lanes, copies = Lanes(mesh.device), Copies(table.values(), mesh)
        check_masters(config.master == "split", table, specs)
        loads: dict[tuple[str, ...], list[float]] = {}
        buckets = []
        for spec in specs:
            mine, placement = groups[spec.axes, spec.replicas], self._plugins.build(spec.placement)
            if not spec.is_shared:  # That lies alike in all stages that have it, whatever else they have.
                placement = balanced(placement, loads, spec.axes, mine.gather.size)
            holders = copies.holders.get(spec.infos[0].name) if spec.is_shared else None
            buckets.append(Bucket(spec, placement, table, mesh, mine, lanes, config, readers, holders))
        for bucket in buckets:
            for info, shape in zip(bucket.infos, bucket.geometry.shapes, strict=True):
                for alias in names_here(info):
                    owner, _, attribute = alias.rpartition(".")
                    take_place(modules[owner], attribute, bucket.whole[info.name], bucket.name, shape)
        materialise_buffers(model, mesh.device, table.seed)
        # Also a meeting: no rank gathers before every rank's shards are filled.
        mesh.stage.agree([bucket.facts() for bucket in buckets], "the bucket plan")
        for group in dict.fromkeys(group for bucket in buckets for group in (bucket.groups.gather, bucket.groups.replicas)):
            group.agree([bucket.sizes() for bucket in buckets if group in bucket.groups], "the bucket plan")
        copies.agree({bucket.infos[0].name: [bucket.facts(), bucket.sizes()] for bucket in buckets if bucket.holders is not None})
        return FlexShardModel(model, table, buckets, config, lanes, copies)


@dataclasses.dataclass(frozen=True)
class Phase:
    """Buckets that are updated together, and their trained parameters."""

    buckets: tuple[Bucket, ...]
    names: tuple[str, ...]


class FlexShardModel:
    """See `intarsia.contracts.ShardedModel`; beyond it the lifecycle that a schedule drives (`drive`, `unshard`, `reshard`, `reduce`, `finalise`). Stability: provisional."""

    def __init__(
        self, model: nn.Module, table: ParameterTable, buckets: list[Bucket], config: FlexShardConfig, lanes: Lanes, copies: Copies
    ) -> None:
        self.buckets, self.lanes, self._copies = buckets, lanes, copies
        self._model, self._config, self._gradient_dtype = model, config, getattr(torch, table.dtype)
        self._by_name = {bucket.name: bucket for bucket in buckets}
        self._reshard, self._poison, self._driven = True, config.debug, True
        self._last, self._any_unsynced = True, False
        self._pending: list[Reduction] = []
        self._early: tuple[Optimizer, Any] | None = None
        self._updated: set[Bucket] = set()
        self._numbers = itertools.count()
        # Calls that the backward pass is in.
        self._entered: list[Call] = []
        self._steps = 0
        self.self_contained = False
        modules = dict(model.named_modules(remove_duplicate=False))
        for bucket in buckets:
            bucket.needs_backward = any(needs_weights(modules[name]) for name in bucket.drivers)
        self.gathers = Gathers(buckets, lanes, copies.stage, config.debug)
        masters = {name: master for bucket in buckets for name, master in bucket.masters.items()}
        self._parameters = {name: masters[name] for name in table}
        self._phases = self._plan_update()
        # Activations are at their most as the last bucket is needed; backward has given half of them back once the one in the middle is left.
        self._halves = [bucket.halves for bucket in buckets if bucket.halves is not None]
        last: list[Bucket | None] = [turn[-1] for turn in self.gathers.turns]
        self._half_way, self._fullest = (last[(len(last) - 1) // 2], last[-1]) if len(last) > 1 else (None, None)
        self._modules = self._install()
        self._places, self._placing = Places(buckets), Placing(buckets, config.placed)
        refuse_copies(modules.values(), buckets)
        model.zero_grad = lambda set_to_none=True: self.zero_gradients()  # type: ignore[method-assign]

    # ------------------------------------------------------------ build

    def _plan_update(self) -> list[Phase]:
        """The last half first, while the first buckets' reductions end; then what the next step needs first, so that its gathers run under the rest."""
        first = self.gathers.first()
        early = [bucket for bucket in self.buckets if bucket in first or bucket.is_kept]
        others = [bucket for bucket in self.buckets if bucket not in early]
        half = len(others) // 2
        phases = []
        for members in (others[half:], early, others[:half]):
            names = tuple(name for bucket in members for name in bucket.trained_names)
            phases.append(Phase(tuple(members), names))
        return [phase for phase in phases if phase.buckets]

    def _install(self) -> list[tuple[str, nn.Module]]:
        modules = dict(self._model.named_modules(remove_duplicate=False))
        self._model.register_forward_pre_hook(untraced(lambda module, args: self._begin_pass()))
        found = []
        for bucket in self.buckets:
            for name in bucket.drivers:
                module, is_root = modules[name], name == ""
                module.register_forward_pre_hook(self._before_forward(bucket, is_root), with_kwargs=True)
                module.register_forward_hook(self._after_forward(bucket, is_root), with_kwargs=True, always_call=True)
                found.append((bucket.name, module))
        return found

    # ------------------------------------------------------------ the contract

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Master shards by canonical name, in the model's order."""
        return self._parameters

    def masters(self) -> Mapping[str, Tensor]:
        """Master values to save: live storages, or float32 copies where masters are split."""
        values = {name: value for bucket in self.buckets for name, value in bucket.values().items()}
        return {name: values[name] for name in self._parameters}

    def load_masters(self, values: Mapping[str, Tensor]) -> None:
        """Take back what `masters` gave, or copies of it."""
        check_values(self._parameters, values)
        for bucket in self.buckets:
            bucket.take(dict(values))

    def set_last_micro_batch(self, last: bool) -> None:
        """Whether buckets are reduced as the next backward pass leaves them."""
        self._last = last
        self._any_unsynced |= not last

    def finish_gradients(self, wait: bool = True) -> None:
        """Reduce what is left, the last bucket first, and give everything back. Without `wait` sums may still be under way: `update` waits for what it needs."""
        self._places.check_trained()
        self.lanes.end_spans()
        for bucket in reversed(self.buckets):
            if bucket.reduction is not None and (bucket.open or bucket.reduction.has_gradients()) and bucket.holders is None:
                self._reduce(bucket)
            bucket.open = True
            bucket.forget_calls()
            if self._poison and not bucket.is_kept:
                bucket.free(True)
        self._reduce_copies()
        if wait:
            self._complete_all()
        self._entered.clear()
        self._last, self._any_unsynced = True, False

    finalise = finish_gradients

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        for bucket in self.buckets:
            if bucket.reduction is not None:
                bucket.reduction.forget()
            bucket.open = True
            bucket.forget_calls()
        self._pending.clear()
        self._entered.clear()
        self._any_unsynced = False
        self.lanes.end_spans()

    @torch.no_grad()
    def update(self, optimizer: Optimizer, factor: Any) -> None:
        """Let the optimizer update the masters, bucket by bucket as their sums arrive, and start the next step's first gathers under the rest of it."""
        try:
            self._update(optimizer, factor)
        except BaseException:
            self._give_up_update()
            raise

    def _give_up_update(self) -> None:
        """An update has failed: some masters may have changed and others not, and what was gathered or quantised is of neither."""
        for reduction in self._pending:
            reduction.cancel()
        self._updated.clear()
        with contextlib.suppress(DistributedError):  # Where ranks are gone that error is the one to see, or its cause is.
            self.after_update()

    def _update(self, optimizer: Optimizer, factor: Any) -> None:
        gathers = self.gathers
        gathers.fence()
        gathers.drop()
        if self.lanes.on_device and any(bucket.is_offloaded for bucket in self.buckets):
            self.lanes.gather.synchronize()  # The host is about to write what it copies from.
        early, started = next(iter([*gathers.order, *gathers.kept]), None), False
        for phase in self._phases:
            for bucket in phase.buckets:
                if bucket.reduction is not None:
                    bucket.reduction.complete()
            due = [bucket for bucket in phase.buckets if bucket not in self._updated]
            names = phase.names if len(due) == len(phase.buckets) else tuple(name for bucket in due for name in bucket.trained_names)
            if (observer := self.lanes.observer) is not None and due:
                observer.enter("update", ", ".join(bucket.name for bucket in due))
            self._apply(optimizer, factor, due, names)
            self.lanes.end_spans()
            if not started and early in phase.buckets:
                started = True
                gathers.launch_first()
        self._pending.clear()
        self._updated.clear()
        gathers.is_stale, gathers.is_fence_due = not started, True
        if gathers.change_depth():
            self._phases = self._plan_update()
        self._steps += 1
        if self.self_contained:
            gathers.fence()
            self.lanes.join()
            gathers.forget_events()
        elif self.lanes.on_device and self._steps == RECORDED_AFTER:
            self._record()

    @contextlib.contextmanager
    def update_in_backward(self, optimizer: Optimizer, factor: Any) -> Iterator[None]:
        """Within it the last micro-batch's backward updates each bucket behind its reduction, and drops its gradients; `update` does what is left.

        For steps that look at no gradient before the update: no clipping, no norm. Numbers are those of `update` alone.
        """
        self._early = (optimizer, factor)
        try:
            yield
        except BaseException:
            self._give_up_update()
            raise
        finally:
            self._early = None

    def _update_early(self, bucket: Bucket, optimizer: Optimizer, factor: Any, sums: Any = None) -> None:
        self._updated.add(bucket)
        observer, beside = self.lanes.observer, self.lanes.on_device
        if observer is not None:
            (observer.begin if beside else observer.enter)("update", bucket.name)
        self._apply(optimizer, factor, [bucket], bucket.trained_names, sums)
        if observer is not None:
            (observer.end if beside else observer.leave)("update", bucket.name)

    @staticmethod
    def _apply(optimizer: Optimizer, factor: Any, buckets: Sequence[Bucket], names: tuple[str, ...], sums: Any = None) -> None:
        for bucket in buckets:
            if bucket.halves is not None:
                bucket.halves.arrive()
        payloads = [bucket.payload for bucket in buckets]
        written = step_quantising(optimizer, factor, names, payloads, sums) if names else []
        for bucket in buckets:
            if bucket.payload in written:
                bucket.payload.encode_values()
            else:
                bucket.payload.encode()
            if bucket.halves is not None:
                bucket.halves.leave()

    def _record(self) -> None:
        """Everybody has communicated: collectives can be recorded."""
        torch.cuda.synchronize()
        for bucket in self.buckets:
            bucket.record()
        torch.cuda.synchronize()

    def after_update(self) -> None:
        """The masters have changed: what was gathered from them is given back."""
        self.gathers.drop()
        self.gathers.is_stale = self.gathers.is_fence_due = True

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that drive buckets, by the bucket's name."""
        yield from self._modules

    # ------------------------------------------------------------ the lifecycle, for schedules

    def drive(self, driver: str) -> None:
        """Who decides when buckets move: hooks (module calls and their backward), or schedule (only the calls below)."""
        if driver not in ("hooks", "schedule"):
            raise UsageError(
                f"A bucket is driven by hooks or by a schedule, not by {driver!r}. {did_you_mean(driver, ('hooks', 'schedule'))}"
            )
        self._driven = driver == "hooks"

    def unshard(self, name: str, wait: bool = True) -> None:
        """Gather a bucket by its name; without `wait` only begin to. A bucket that a schedule drives stays until it is resharded: where another one of its slot
        is unsharded before that, the other gets memory of its own."""
        bucket = self._bucket(name)
        self.gathers.launch(bucket)
        bucket.is_held = not self._driven
        if wait:
            bucket.settle()

    def reshard(self, name: str) -> None:
        """A bucket's memory may be used for others."""
        bucket = self._bucket(name)
        bucket.entered, bucket.is_held = False, False
        bucket.running.clear()
        bucket.free(self._poison)

    def accumulate(self, name: str) -> None:
        """Put aside what backward (or whoever writes `.grad`) has left on a bucket's whole parameters, in the reduction dtype: for schedules, between the backward passes of
        micro-batches that are reduced together. All ranks of the bucket do, or none."""
        bucket = self._bucket(name)
        self._any_unsynced = True
        if bucket.reduction is not None:
            self._accumulate(bucket)

    def reduce(self, name: str) -> None:
        """Begin to sum a bucket's gradients over the ranks, those of earlier unsynchronised micro-batches included. A bucket that several pipeline stages have waits for
        `finish_gradients`."""
        bucket = self._bucket(name)
        if bucket.reduction is not None and bucket.holders is None:
            self._reduce(bucket)

    def set_reshard(self, reshard: bool) -> None:
        """Whether buckets are given back after forward and backward (those that the recipe lets); False keeps a bucket in its slot until another needs it."""
        self._reshard = reshard

    def set_prefetch(self, depth: int) -> None:
        """How many buckets ahead gathers start, from the next step on. Every rank calls it; they agree at the step's border."""
        self.gathers.ask_depth(depth)

    def keep_halves(self) -> None:
        """Low halves of split masters stay on the device from now on."""
        for bucket in self.buckets:
            if bucket.halves is not None:
                bucket.halves.arrive()
                bucket.halves = None
        self._halves = []

    def _bucket(self, name: str) -> Bucket:
        if name not in self._by_name:
            raise UsageError(f"There is no bucket {name!r}. {did_you_mean(name, self._by_name)}")
        return self._by_name[name]

    # ------------------------------------------------------------ a pass

    def _begin_pass(self) -> None:
        """A forward pass of the model begins."""
        self._places.check_places()
        self._placing.begin_pass()
        self.lanes.begin()
        if self.lanes.observer is not None and not in_backward():
            self.lanes.observer.clear()
        if self._any_unsynced and not in_backward():
            # What no module call has picked up (the root's, an embedding's) is put aside, so that micro-batches are added in the reduction dtype.
            for bucket in self.buckets:
                if bucket.reduction is not None and bucket.reduction.has_gradients():
                    bucket.reduction.accumulate()
        if self.self_contained:
            self.lanes.fork()

    # ------------------------------------------------------------ reductions

    def _accumulate(self, bucket: Bucket) -> None:
        assert bucket.reduction is not None
        with torch.no_grad():
            bucket.reduction.accumulate()

    def _reduce(self, bucket: Bucket) -> None:
        # Backward computes without gradients of its own, unless it was asked to create a graph; calls from outside may come with them.
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._reduce(bucket)
            return
        reduction = bucket.reduction
        assert reduction is not None
        if bucket in self._updated:
            raise PluginError(
                f"Bucket {bucket.name!r} was updated in this backward pass, and there are gradients for it again. Within `update_in_backward` one backward pass "
                "reaches each bucket: run the others before it, with set_last_micro_batch(False), or call `update` instead."
            )
        bucket.open = False
        if len(self._pending) >= PENDING:
            self._pending.pop(0).complete()
        if reduction.is_waiting:
            reduction.complete()
        is_early = self._early is not None and self._last
        takes_sums = is_early and bucket.is_split and getattr(self._early[0], "takes_sums", False)  # type: ignore[index]
        if bucket.halves is not None:  # What waits on the host comes early where that spares a sum, which takes twice as much.
            is_early = takes_sums = takes_sums and reduction.can_hand_on
            if is_early:
                bucket.halves.come()
        then = functools.partial(self._update_early, bucket, *self._early) if is_early else None  # type: ignore[misc]
        reduction.start(self._any_unsynced, then, takes_sums)
        self._pending.append(reduction)

    def _reduce_copies(self) -> None:
        """The gradients that several pipeline stages have a part of. All stages do this in one order."""
        mine = {bucket.infos[0].name: bucket for bucket in self.buckets if bucket.holders is not None}
        for name, holders in self._copies.holders.items():
            if name in mine:
                self._reduce(mine[name])
                if not self.lanes.on_device:
                    mine[name].reduction.complete()  # type: ignore[union-attr]
            else:
                self.lanes.enter(self.lanes.reduce)
                holders.join(self._copies.nothing(self._gradient_dtype))
                self.lanes.leave()

    def _complete_all(self) -> None:
        for reduction in self._pending:
            reduction.complete()
        self._pending.clear()

    # ------------------------------------------------------------ hooks

    def _before_forward(self, bucket: Bucket, is_root: bool) -> Callable[..., None]:
        gathers = self.gathers

        def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._driven:
                return
            if self.lanes.observer is not None:
                self.lanes.observer.enter("forward", bucket.name)
            recomputing = in_backward()
            given: Inputs | None = None
            call = Call(bucket, next(self._numbers), gathers.epoch, recomputing)
            if self._entered and not recomputing:
                self._end_backward(bucket)
            gathers.launch(bucket)
            bucket.running.append((call, None))
            bucket.settle()
            if not recomputing:
                gathers.prefetch(bucket.forward)
                if bucket is self._fullest:
                    for halves in self._halves:
                        halves.drop()
            if not is_root and torch.is_grad_enabled():
                inputs = differentiable((*args, *kwargs.values()))
                if inputs:
                    # Fires when the gradients of all inputs are known. Autograd runs later operations first, so the parameters have theirs by then.
                    leave = functools.partial(self._leave_known, weakref.ref(call))
                    given = when_known(inputs, leave)
                    bucket.running[-1] = (call, given)

        return untraced(before_forward)

    def _after_forward(self, bucket: Bucket, is_root: bool) -> Callable[..., None]:
        def after_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._driven:
                return
            if not bucket.running:  # The hook before has failed.
                return
            call, given = bucket.running.pop()
            call.end, hidden = next(self._numbers), False
            if torch.is_grad_enabled() and handled() == call.handled:
                # What the call was given and hands on has not been computed by it, and may be reached long after it is left.
                passed = () if given is None else given.nodes
                results = differentiable((output,))
                outputs = [node for tensor in results if (node := tensor.grad_fn) is not None and node not in passed]
                for node in outputs:
                    # Before the operation that made the output, and so after what leaves a module that has this output as its input. The outputs hold
                    # what tells that the inputs' gradients are all known.
                    node.register_prehook(functools.partial(self._enter, call, given))
                # An output that hides its tensors could be entered unseen: then the parameters stay.
                hidden = not outputs and bool(bucket.trained)
                if not outputs and given is not None:
                    bucket.hidden.append(given)
                # A recomputation replaces a call that was counted, or belongs to one that leaves once for each time it is run.
                if (outputs or hidden) and not is_root and not call.is_again:
                    bucket.expect(call)
            if hidden:
                call.is_hidden = bucket.entered = True
                self._entered.append(call)
            elif not (is_root or bucket.entered or bucket.running or bucket.is_kept) and self._reshard:
                bucket.free(self._poison)
            if self.lanes.observer is not None:
                self.lanes.observer.leave("forward", bucket.name)

        return untraced(after_forward)

    def _enter(self, call: Call, given: Inputs | None, gradient: Any) -> None:
        """The backward pass has reached the module's output. `given` is only held."""
        if not self._driven:
            return
        bucket = call.bucket
        if call.epoch != self.gathers.epoch:
            raise PluginError(
                f"Bucket {bucket.name!r}: the parameters were updated between this forward pass and its backward pass, whose gradients would be wrong. "
                "Run backward before the optimizer steps."
            )
        if torch.is_grad_enabled() and bucket.slot is not None and not bucket.is_kept:
            raise PluginError(
                f"Bucket {bucket.name!r}: this backward pass is itself to be differentiated (create_graph=True), and would find other parameters in the bucket's "
                "memory then. Set reshard=never for the bucket, or sharder.reshard=never."
            )
        # Autograd runs later operations first: what was called after this call was over has all its gradients, though an input's may come only at the end,
        # or nobody asks for one.
        for later in sorted(self._entered, key=lambda other: -other.number) if self._entered else ():
            if later.number > call.end:
                self._leave(later)
        if self.lanes.observer is not None:
            self.lanes.observer.enter("backward", bucket.name)
        bucket.open, call.is_left = True, False
        if not bucket.is_of_root and call not in self._entered:
            self._entered.append(call)
        if bucket.needs_backward:
            self.gathers.launch(bucket)
            bucket.entered = True
            bucket.settle()
            self.gathers.prefetch(bucket.backward)
        self._placing.enter(call, self._any_unsynced)

    def _leave_known(self, known: weakref.ref[Call], gradient: Any = None) -> None:
        """All gradients of a call's inputs are known, or its one input's `gradient`."""
        call = known()
        if call is not None and not call.is_left:
            self._leave(call)

    def _close(self, call: Call) -> Bucket:
        """The backward pass has done with a call."""
        bucket, call.is_left = call.bucket, True
        if call.reference is not None:
            bucket.pending.discard(call.reference)
        if call in self._entered:
            self._entered.remove(call)
        bucket.entered = bool(self._entered) and any(other.bucket is bucket for other in self._entered)
        return bucket

    def _end_backward(self, bucket: Bucket) -> None:
        """A forward call of `bucket` begins outside of a backward pass: the last one has left all calls, those included that no other call's backward came after."""
        for call in [other for other in self._entered if not other.is_hidden or other.bucket is bucket]:
            self._close(call)

    def _leave(self, call: Call) -> None:
        """The backward pass has produced all gradients of one call."""
        bucket = self._close(call)
        if not self._driven:
            return
        if not (bucket.is_kept or bucket.is_in_use) and self._reshard:
            bucket.free(self._poison)
        # The bucket before is there already, and this one's slot is free.
        self.gathers.prefetch(bucket.further)
        # Gradients of parameters that several calls share come with the last of them.
        if bucket.reduction is not None and bucket.open and not bucket.pending:
            for halves in self._halves if bucket is self._half_way else ():
                halves.come()
            is_due = self._last or self._config.gradients == "sharded"
            if bucket.holders is None or not is_due:  # What several stages have waits on the parameters for the step's end.
                (self._reduce if is_due else self._accumulate)(bucket)
        if self.lanes.observer is not None:
            self.lanes.observer.leave("backward", bucket.name)
