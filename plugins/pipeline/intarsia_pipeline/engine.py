"""The engine `pipeline`: what the trainer calls. Torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.config import Recipe
from intarsia.contracts import Batch, Loss, LossSum, Parallel, ShardedModel
from intarsia.errors import PluginError, UsageError
from intarsia_eager.context import windows_of
from intarsia_eager.engine import prepare, prepare_regions
from intarsia_eager.memory import keep_freed_memory
from intarsia_eager.not_finite import as_written, checked, explain_not_finite
from torch import nn

from intarsia_pipeline import weights
from intarsia_pipeline.actions import Schedule
from intarsia_pipeline.buckets import Driver
from intarsia_pipeline.build import Knobs, check_micro_batches, name_of, ready
from intarsia_pipeline.capture import Recordings, check_capture
from intarsia_pipeline.config import PipelineConfig
from intarsia_pipeline.executor import Stages, Step, evaluate
from intarsia_pipeline.lower import releases
from intarsia_pipeline.split import Part
from intarsia_pipeline.transfers import Transfers


class PipelineEngine:
    """See `intarsia.contracts.Engine`. Each rank computes its own stages, in the schedule's order."""

    def __init__(self, config: PipelineConfig, model: nn.Module, loss: Loss, part: Part, parallel: Parallel) -> None:
        self._config, self._part, self._model, self._loss = config, part, model, loss
        windows, ahead = windows_of(model), getattr(model, "predicts_ahead", 0)
        self._stages = Stages(
            model,
            loss,
            {each.index: each for each in part.stages},
            part.placement,
            part.group.rank,
            lambda batch: prepare(batch, ahead, parallel, windows),
        )
        self._transfers = Transfers(part.group, part.ways, part.placement)
        self._schedules: dict[int, Schedule] = {}
        self._releases: dict[int, Any] = {}
        self._driver: Driver | None = None
        self._sharded: ShardedModel | None = None
        self._splits = config.split_backward and self.schedule(part.micro_batches).split
        if self._splits:
            weights.install()
        if config.capture:
            self._stages.recordings = Recordings(windows, part.group.graphs)
        self._transfers.introduce()

    def schedule(self, micro_batches: int) -> Schedule:
        """The validated schedule for a step of so many micro-batches; made once."""
        if micro_batches not in self._schedules:
            made, _ = ready(self._config.schedule, self._part.ranks, micro_batches, Knobs.of(self._config))
            self._part.group.agree([made.name, micro_batches, made.placement, made.plan], "the pipeline schedule")
            self._schedules[micro_batches] = made
            self._releases[micro_batches] = releases(made, self._part.group.rank)
        return self._schedules[micro_batches]

    def run(self, batches: Sequence[Batch], scale: float, sharded: ShardedModel) -> list[LossSum]:
        """A step by the schedule; see `intarsia.contracts.Engine`."""
        schedule = self.schedule(len(batches))
        driver = self._driver_of(sharded)
        driver.begin(len(batches), self._splits)
        try:
            results = Step(self._stages, self._transfers, driver, schedule, batches, scale, self._splits).run(self._releases[len(batches)])
        except BaseException:
            self._transfers.abandon()
            raise
        finally:
            driver.rest()
        if not driver.is_driven:
            self._sum_ties()
        return results

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> LossSum:
        """Forward and loss, stage by stage."""
        return evaluate(self._stages, self._transfers, batch)

    def explain_not_finite(self, batches: Sequence[Batch], scale: float, sharded: ShardedModel, world: Communicator) -> str:
        """See `intarsia.contracts.Engine`."""
        self._driver_of(sharded)
        return explain_not_finite(self.find_not_finite, batches, scale, sharded, world)

    def find_not_finite(self, batch: Batch, scale: float) -> dict[str, Any] | None:
        """The first module of the whole pipeline whose output, or that output's gradient, is not finite, on its rank; None on the others. Every rank calls it."""
        assert self._sharded is not None
        recordings, self._stages.recordings = self._stages.recordings, None
        try:
            with as_written(), checked(self._model) as offences:
                (result,) = self.run([batch], scale, self._sharded)
        finally:
            self._stages.recordings = recordings
        if not offences and not bool(torch.isfinite(result.total)):
            offences.append({"module": "the loss", "where": "forward"})
        # What one stage hands on is found by the next as well: of all forward passes the first stage's, else of all backward passes the last one's.
        first = min(((self._order(each), number) for number, each in enumerate(offences)), default=None)
        places = self._part.group.gather_json(None if first is None else first[0], what="stages that are not finite")
        if first is None or min(place for place in places if place is not None) != list(first[0]):
            return None
        return offences[first[1]]

    def _order(self, offence: Mapping[str, Any]) -> tuple[int, int]:
        """When a module's turn is in a micro-batch: forward from the first stage on, then backward from the last."""
        name = str(offence["module"]).partition(" ")[0]
        own = self._part.stages
        stage = next((each.index for each in own if any(f"{name}.".startswith(f"{block}.") for block in each.blocks)), None)
        if stage is None:  # The model itself or what stands at its ends.
            stage = own[0].index if own[0].first and not own[-1].last else own[-1].index
        is_backward = "backward" in str(offence["where"])
        return int(is_backward), -stage if is_backward else stage

    def _driver_of(self, sharded: ShardedModel) -> Driver:
        if self._driver is None or self._sharded is not sharded:
            self._sharded = sharded
            self._driver = Driver(sharded, self._model, self._part.stages)
        return self._driver

    @torch.no_grad()
    def _sum_ties(self) -> None:
        """Gradients of parameters that several ranks have, for sharders that do not see to it themselves. All ranks take part, in one order."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        for tie in self._part.ties:
            mine = named.get(tie.here)
            gradient = None if mine is None else mine.grad
            total = torch.zeros(tie.shape, device=self._transfers.device) if gradient is None else gradient.float()
            self._part.group.all_reduce(total, "sum", f"gradient of {tie.name} over stages")
            if mine is not None:
                mine.grad = total.to(mine.dtype).view_as(mine)


def build(config: PipelineConfig, model: nn.Module, loss: Loss, recipe: Recipe, parallel: Parallel | None = None) -> PipelineEngine:
    """The entry's target."""
    part = None if parallel is None else parallel.part
    if parallel is None or part is None:
        raise UsageError("The engine `pipeline` runs stages of a model, and mesh.pp is 1. Set mesh.pp, or choose engine=eager.")
    if not isinstance(part, Part):
        raise PluginError(
            f"The engine `pipeline` needs the part that intarsia_pipeline.split.split gives, and the paralleliser made a {type(part).__name__}."
        )
    if "stage" not in inspect.signature(type(model).forward).parameters:
        raise PluginError(
            f"{type(model).__name__}.forward takes no argument `stage`: it cannot run a part of itself. Derive the family from intarsia_models_common.base.LanguageModel, or "
            "give its forward(inputs, context, stage=None) the StagePart's meaning."
        )
    check_micro_batches(config.schedule, part.ranks, part.micro_batches, config.few_micro_batches)
    splits = config.split_backward and ready(config.schedule, part.ranks, part.micro_batches, Knobs.of(config))[0].split
    if splits and recipe.compile.mode != "none":
        raise UsageError(
            f"compile.mode={recipe.compile.mode} traces through the matrices whose gradients schedule {name_of(config.schedule)!r} puts off. Set engine.split_backward=False, "
            "choose a schedule that does not split backward (1f1b, interleaved), or compile.mode=none."
        )
    if config.capture:
        check_capture(config, recipe, model, part.group.device, splits)
    if part.group.device.type == "cpu":
        keep_freed_memory()
    prepare_regions(model, recipe.compile, recipe.recompute)
    return PipelineEngine(config, model, loss, part, parallel)
