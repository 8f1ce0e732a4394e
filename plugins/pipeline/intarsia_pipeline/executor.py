"""Running a schedule: one step's actions of this rank, one after the other. Torch.

What runs is fixed by the schedule alone, never by who is ready first: the same numbers in every run. Nothing here waits for a message that a computation of this rank still has
to cause, since the schedule was validated with these sends and receives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from intarsia import logical
from intarsia.contracts import Batch, Loss, LossSum, SequenceContext, StagePart
from torch import Tensor, nn

from intarsia_pipeline import weights
from intarsia_pipeline.actions import MESSAGES, Action, Schedule
from intarsia_pipeline.buckets import Driver
from intarsia_pipeline.payload import Form, form_of
from intarsia_pipeline.transfers import Transfers
from intarsia_pipeline.validate import Message, message

Prepare = Callable[[Batch], tuple[Batch, SequenceContext]]


@dataclasses.dataclass
class Held:
    """What a forward leaves for its backward: the inputs that get gradients, the results that have some, the queue of weights' gradients, and the recording that has run in the place of autograd."""

    inputs: list[Tensor]
    results: list[Tensor]
    queue: weights.Queue | None
    recording: Any = None


@dataclasses.dataclass
class Stages:
    """This rank's stages by number and what computes them; `placement` is the rank of each stage, `recordings` are their CUDA graphs, where they have any."""

    model: nn.Module
    loss: Loss
    parts: dict[int, StagePart]
    placement: tuple[int, ...]
    rank: int
    prepare: Prepare
    recordings: Any = None

    def is_here(self, stage: int) -> bool:
        """Whether a stage is this rank's."""
        return self.placement[stage] == self.rank


class Step:
    """One step's run of a schedule on this rank; `run` returns the micro-batches' sums."""

    def __init__(
        self,
        stages: Stages,
        transfers: Transfers,
        driver: Driver,
        schedule: Schedule,
        batches: Sequence[Batch],
        scale: float,
        split: bool,
    ) -> None:
        self._stages, self._transfers, self._driver, self._scale = stages, transfers, driver, scale
        self._actions = schedule.plan[stages.rank]
        self._batches = list(batches)
        self._prepared: dict[int, tuple[Batch, SequenceContext]] = {}
        self._keys = [key_of("train", batch) for batch in batches]
        self._held: dict[tuple[int, int], Held] = {}
        self._handed: dict[tuple[str, int, int], Any] = {}
        self._split = {(action.stage, action.micro_batch) for action in self._actions if split and action.kind == "I"}
        self._sums: list[dict[str, Tensor]] = [{} for _ in batches]
        self._totals: list[Tensor | None] = [None] * len(batches)
        self._lasts = {action.stage: action for action in self._actions if action.kind in ("B", "I")}
        # After the last forward of a micro-batch on this rank its context may go.
        self._last_forward = {action.micro_batch: action for action in self._actions if action.kind == "F"}
        self._last_backward = next((action for action in reversed(self._actions) if action.kind in ("B", "I")), None)

    def run(self, releases: Mapping[Message, Sequence[Message]]) -> list[LossSum]:
        """Every action in turn. `releases` are `intarsia_pipeline.lower.releases` of the schedule, made once."""
        self._transfers.begin(releases)
        for action in self._actions:
            self._do(action)
        self._transfers.finish()
        nothing = torch.zeros((), device=self._transfers.device)
        return [LossSum(nothing if total is None else total, sums) for total, sums in zip(self._totals, self._sums, strict=True)]

    def _do(self, action: Action) -> None:
        kind, stage = action.kind, action.stage
        if kind == "F":
            self._forward(action)
        elif kind in ("B", "I"):
            self._backward(action)
        elif kind == "W":
            self._weights(action)
        elif kind in MESSAGES:
            # What is sent was handed over by its computation, in the order of the schedule.
            if kind.startswith("RECEIVE"):
                self._transfers.expect(message(action), self._keys[action.micro_batch])
            else:
                self._send(action)
        elif kind == "UNSHARD":
            self._driver.unshard(stage)
        elif kind == "RESHARD":
            self._driver.reshard(stage)
        else:
            self._driver.reduce(stage)

    # ------------------------------------------------------------ forward

    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.micro_batch
        if number not in self._prepared:
            self._prepared[number] = self._stages.prepare(self._batches[number])
        batch, context = self._prepared[number]
        inputs, leaves = self._inputs(stage, number, batch)
        queue: weights.Queue | None = [] if (stage, number) in self._split else None
        self._driver.unshard(stage, wait=True)
        recordings, recording = self._stages.recordings, None
        with logical.micro_batch(self._scale) as further, weights.deferring(queue):
            if recordings is None:
                result = compute(self._stages, stage, inputs, batch, context)
            else:
                recording = recordings.take(self._stages, stage, self._keys[number], inputs, leaves, batch, context)
                result = recording.forward(inputs, batch)
            results = self._leave(stage, number, result)
        self._add_sums(number, further)
        self._held[stage, number] = Held(leaves, results, queue, recording)
        if self._last_forward[number] is action:
            del self._prepared[number]

    def _inputs(self, stage: int, number: int, batch: Batch) -> tuple[Any, list[Tensor]]:
        """What the stage is given, and those tensors of it whose gradients go back."""
        if self._stages.parts[stage].first:
            return batch.tokens_BS, []
        form, tensors = self._take("F", stage - 1, number)
        given = [tensor.detach() for tensor in tensors]
        leaves = [tensor.requires_grad_() for leaf, tensor in zip(form.leaves, given, strict=True) if leaf.differentiable]
        return form.build(given), leaves

    def _leave(self, stage: int, number: int, result: Any) -> list[Tensor]:
        """Hand on the stage's result; returns the tensors at which its backward begins."""
        if isinstance(result, LossSum):
            # A recording's memory holds the next micro-batch's soon.
            keep = torch.Tensor.clone if self._stages.recordings is not None else torch.Tensor.detach
            self._totals[number] = keep(result.total)
            self._add_sums(number, {name: keep(value) for name, value in result.sums.items()})
            return [result.total * self._scale]
        form, tensors = form_of(result)
        self._handed["F", stage, number] = result if not self._stages.is_here(stage + 1) else (form, tensors)
        return [tensor for leaf, tensor in zip(form.leaves, tensors, strict=True) if leaf.differentiable]

    def _add_sums(self, number: int, further: dict[str, Tensor]) -> None:
        sums = self._sums[number]
        for name, value in further.items():
            sums[name] = sums[name] + value if name in sums else value

    # ------------------------------------------------------------ backward

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.micro_batch
        held = self._held.pop((stage, number))
        gradients: list[Tensor | None] = [None]
        if not self._stages.parts[stage].last:
            gradients = list(self._take("B", stage + 1, number)[1])
        self._driver.unshard(stage, wait=True)
        self._driver.before_backward(action is self._last_backward)
        if held.recording is not None:
            self._replay_backward(action, held, gradients)
            return
        roots = [(root, gradient) for root, gradient in zip(held.results, gradients, strict=True) if root.requires_grad]
        if roots:
            # The scale is for losses that forward adds when it is computed again; their sums are known already.
            with logical.micro_batch(self._scale), weights.deferring(held.queue):
                torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        if not self._stages.parts[stage].first:
            self._handed["B", stage, number] = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in held.inputs]
            for leaf in held.inputs:
                leaf.grad = None
        if held.queue is not None:
            self._held[stage, number] = Held([], [], held.queue)
        self._driver.after_backward(stage)

    def _replay_backward(self, action: Action, held: Held, gradients: Sequence[Tensor | None]) -> None:
        stage, number = action.stage, action.micro_batch
        given = held.recording.backward([self._scale if gradient is None else gradient for gradient in gradients])
        self._stages.recordings.give_back(stage, self._keys[number], held.recording)
        if not self._stages.parts[stage].first:
            self._handed["B", stage, number] = given
        self._driver.after_backward(stage)

    def _weights(self, action: Action) -> None:
        held = self._held.pop((action.stage, action.micro_batch), None)
        if held is not None and held.queue:
            weights.run(held.queue)
            self._driver.after_backward(action.stage)

    # ------------------------------------------------------------ messages

    def _take(self, direction: str, stage: int, number: int) -> tuple[Form, list[Tensor]]:
        """What stage `stage` gave: from this rank, or from another."""
        if not self._stages.is_here(stage):
            return self._transfers.take((direction, stage, number))
        handed = self._handed.pop((direction, stage, number))
        return handed if direction == "F" else (Form(None, ()), handed)

    def _send(self, action: Action) -> None:
        stage, number = action.stage, action.micro_batch
        if action.kind == "SEND_F":
            self._transfers.send_payload(stage, number, self._keys[number], self._handed.pop(("F", stage, number)))
        else:
            self._transfers.send_gradients(stage, number, self._handed.pop(("B", stage, number)))


def key_of(mode: str, batch: Batch) -> Hashable:
    """What payloads' forms may depend on: all ranks of a pipeline know it of every batch."""
    added = sorted((name, tuple(value.shape)) for name, value in batch.extra.items() if isinstance(value, torch.Tensor))
    return (mode, tuple(batch.tokens_BS.shape), tuple(added))


def compute(stages: Stages, stage: int, inputs: Any, batch: Batch, context: SequenceContext) -> Any:
    """A stage's forward: what it hands on, or the LossSum of the last."""
    part = stages.parts[stage]
    result = stages.model(inputs, context, stage=part)
    return stages.loss(stages.model, result, batch) if part.last else result  # type: ignore[arg-type]


def evaluate(stages: Stages, transfers: Transfers, batch: Batch) -> LossSum:
    """One batch forward through all stages, without gradients. A collective of the pipeline."""
    key = key_of("evaluate", batch)
    local, context = stages.prepare(batch)
    sums: dict[str, Tensor] = {}
    total = torch.zeros((), device=transfers.device)
    handed: Any = None
    for stage in range(len(stages.placement)):
        if not stages.is_here(stage):
            continue
        if stage == 0:
            inputs: Any = local.tokens_BS
        elif stages.is_here(stage - 1):
            inputs = handed
        else:
            transfers.expect(("F", stage - 1, 0), key)
            form, tensors = transfers.take(("F", stage - 1, 0))
            inputs = form.build(tensors)
        with logical.micro_batch(0.0) as further:
            result = compute(stages, stage, inputs, local, context)
        found = dict(further)
        if isinstance(result, LossSum):
            total = result.total
            found |= dict(result.sums)
        elif stages.is_here(stage + 1):
            handed = result
        else:
            transfers.send_payload(stage, 0, key, result)
        for name, value in found.items():
            sums[name] = sums[name] + value if name in sums else value
    transfers.finish()
    return LossSum(total, sums)
