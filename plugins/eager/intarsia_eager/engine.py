"""The eager engine, and what it does to a model's declared regions before the first step: compile them, recompute them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from intarsia import logical
from intarsia.comm import Communicator
from intarsia.config import CompileConfig, Recipe, RecomputeConfig
from intarsia.contracts import Batch, Loss, LossSum, Model, Parallel, SequenceContext, ShardedModel
from intarsia.errors import UsageError, did_you_mean
from torch import nn
from torch.utils.checkpoint import checkpoint

from intarsia_eager.config import EagerConfig
from intarsia_eager.context import TrainContext, windows_of
from intarsia_eager.following import with_following
from intarsia_eager.memory import keep_freed_memory
from intarsia_eager.not_finite import as_written, checked, explain_not_finite


class EagerEngine:
    """Forward, loss and backward as written. Dtypes are the sharder's: there is no autocast here."""

    def __init__(self, model: nn.Module, loss: Loss, parallel: Parallel | None = None):
        self._model: Any = model  # a module that is an intarsia.contracts.Model
        self._loss, self._parallel = loss, parallel
        self._windows = windows_of(model)

    def run(self, batches: Sequence[Batch], scale: float, sharded: ShardedModel) -> list[LossSum]:
        """Every micro-batch in turn; see `intarsia.contracts.Engine`."""
        results = []
        for number, batch in enumerate(batches):
            sharded.set_last_micro_batch(number == len(batches) - 1)
            results.append(self.micro_batch(batch, scale))
        return results

    def micro_batch(self, batch: Batch, scale: float) -> LossSum:
        """Forward and backward of `total * scale`; the sums come back detached, still on the device."""
        with logical.micro_batch(scale) as further:
            loss = self._forward(batch)
            (loss.total * scale).backward()
        return LossSum(loss.total.detach(), {name: value.detach() for name, value in (further | dict(loss.sums)).items()})

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> LossSum:
        """Forward and loss."""
        with logical.micro_batch(0.0) as further:
            loss = self._forward(batch)
        return LossSum(loss.total, further | dict(loss.sums))

    def explain_not_finite(self, batches: Sequence[Batch], scale: float, sharded: ShardedModel, world: Communicator) -> str:
        """See `intarsia.contracts.Engine`."""
        return explain_not_finite(self.find_not_finite, batches, scale, sharded, world)

    def find_not_finite(self, batch: Batch, scale: float) -> dict[str, Any] | None:
        """The first module whose output, or that output's gradient, is not finite: every one is looked at, compiled regions as written."""
        with as_written(), checked(self._model) as offences:
            result = self.micro_batch(batch, scale)
        if not offences and not bool(torch.isfinite(result.total)):
            offences.append({"module": "the loss", "where": "forward"})
        return offences[0] if offences else None

    def _forward(self, batch: Batch) -> LossSum:
        batch, context = prepare(batch, getattr(self._model, "predicts_ahead", 0), self._parallel, self._windows)
        return self._loss(self._model, self._model(batch.tokens_BS, context), batch)


def prepare(batch: Batch, predicts_ahead: int, parallel: Parallel | None, windows: Sequence[int | None]) -> tuple[Batch, SequenceContext]:
    """This rank's part of a micro-batch, and the context for it: what every engine does before the model. Stability: provisional."""
    batch = with_following(batch, predicts_ahead)
    if parallel is not None:
        batch = parallel.local(batch)
        context = parallel.context(batch, windows)
        if context is not None:
            return batch, context
    return batch, TrainContext.of(batch, windows)


def build(config: EagerConfig, model: nn.Module, loss: Loss, recipe: Recipe, parallel: Parallel | None = None) -> EagerEngine:
    """The entry's target. UsageError for a model of which this process has a pipeline stage only."""
    if parallel is not None and parallel.part is not None:
        raise UsageError(f"The engine `eager` runs whole models, and mesh.pp is {parallel.part.ranks}. Choose engine=pipeline.")
    if next(model.parameters()).device.type == "cpu":
        keep_freed_memory()
    prepare_regions(model, recipe.compile, recipe.recompute)
    return EagerEngine(model, loss, parallel)


def prepare_regions(model: nn.Module, compiling: CompileConfig, recompute: RecomputeConfig) -> None:
    """Compile and mark for recomputation the regions that the recipe asks for.

    Both replace a module's `forward` and leave its hooks outside: a sharder's hooks gather parameters before, and
    are not traced; recomputation in backward runs the inner forward only. Compiled code is recomputed as a whole.
    """
    for module in _compiled(model, compiling):
        module.forward = torch.compile(module.forward, backend=compiling.backend, dynamic=compiling.dynamic or None)
    for module in _recomputed(model, recompute):
        module.forward = functools.partial(_run_recomputed, module.forward)


def _run_recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _compiled(model: nn.Module, config: CompileConfig) -> Iterator[nn.Module]:
    if config.mode not in ("none", "model", "local"):
        raise UsageError(f"compile.mode {config.mode!r} is unknown. {did_you_mean(config.mode, ('none', 'model', 'local'))}")
    if config.mode == "none":
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if config.backend not in known:
        raise UsageError(f"compile.backend {config.backend!r} is unknown to torch. {did_you_mean(config.backend, known)}")
    if config.mode == "model":
        yield model
        return
    regions = cast(Model, model).regions()
    for name in regions.compile or regions.blocks:
        yield model.get_submodule(name)


def _recomputed(model: nn.Module, config: RecomputeConfig) -> Iterator[nn.Module]:
    for name in recomputed_blocks(model, config):
        yield model.get_submodule(name)


def recomputed_blocks(model: nn.Module, config: RecomputeConfig) -> list[str]:
    """Names of the blocks that are recomputed in backward. A block whose module has an attribute `recompute` decides by itself where that is `always` or `never`. UsageError for
    settings that mean nothing. Stability: provisional."""
    if config.mode not in ("none", "blocks"):
        raise UsageError(f"recompute.mode {config.mode!r} is unknown. {did_you_mean(config.mode, ('none', 'blocks'))}")
    if config.every < 1:
        raise UsageError(f"recompute.every is {config.every}; it must be 1 (every block) or more.")
    found = []
    for number, name in enumerate(cast(Model, model).regions().blocks):
        own = getattr(model.get_submodule(name), "recompute", "recipe")
        if own == "always" or (own != "never" and config.mode == "blocks" and number % config.every == 0):
            found.append(name)
    return found
