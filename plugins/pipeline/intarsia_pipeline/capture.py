"""A stage's forward and backward as CUDA graphs: the host launches one thing for each, whatever the number of kernels. Torch.

What is recorded must be the same in every run: shapes, rows of one document each, parameters that do not move (they stay whole for the step). A stage has as many recordings as micro-batches
are under way in it at one time, since each holds the activations of one. Parameters' gradients are computed into memory of the recording and added to `.grad` outside of it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from intarsia import logical
from intarsia.config import Recipe
from intarsia.contracts import Batch, LossSum
from intarsia.errors import UsageError
from intarsia_eager.context import TrainContext
from torch import Tensor, nn

from intarsia_pipeline.payload import Form, form_of

if TYPE_CHECKING:
    from intarsia_pipeline.config import PipelineConfig
    from intarsia_pipeline.executor import Stages

# Runs of a stage before it is recorded: libraries set themselves up, and choose their kernels.
WARM_UP = 2


def check_capture(config: PipelineConfig, recipe: Recipe, model: nn.Module, device: torch.device, splits: bool) -> None:
    """UsageError that names everything in the recipe and the model with which stages cannot be recorded."""
    problems = []
    if device.type != "cuda":
        problems.append(f"the device is {device.type}, and graphs are recorded on CUDA")
    if splits:
        problems.append(
            "the schedule splits backward, and what W runs is decided on the host (engine.split_backward=False, or 1f1b, interleaved, gpipe)"
        )
    if config.unshard != "step":
        problems.append(f"engine.unshard is {config.unshard}, and parameters must stay where they are for the step (engine.unshard=step)")
    if recipe.recompute.mode != "none":
        problems.append(f"recompute.mode is {recipe.recompute.mode}, which looks after random numbers on the host (recompute.mode=none)")
    if recipe.compile.mode != "none":
        problems.append(f"compile.mode is {recipe.compile.mode}, whose guards run on the host (compile.mode=none)")
    if recipe.data.packing != "one_per_row":
        problems.append(
            f"data.packing is {recipe.data.packing}: where documents begin differs from batch to batch (data.packing=one_per_row)"
        )
    problems += dispatch_problems(model)
    if problems:
        raise UsageError("engine.capture: stages cannot be recorded: " + "; ".join(problems) + ".")


def dispatch_problems(model: nn.Module) -> list[str]:
    """What a mixture of experts has against it: the first dispatcher that waits for the device, or whose shapes follow from where tokens go."""
    for name, module in model.named_modules():
        dispatcher = getattr(module, "dispatcher", None)
        promises = getattr(dispatcher, "capabilities", None)
        if promises is None or (promises.static_shapes and not promises.needs_host_sync):
            continue
        what = "waits for the device to learn how many rows arrive" if promises.needs_host_sync else "makes shapes that depend on numbers"
        return [f"the dispatcher of {name}, {type(dispatcher).__name__}, {what} (parallel.dispatcher=fixed_capacity)"]
    return []


def warm_up(stage: int, model: nn.Module, run: Callable[[], Any]) -> None:
    """Run what will be recorded, for nothing: what models count in their buffers stays as it was. UsageError where the host draws random numbers, which every replay would repeat."""
    drawn, kept = torch.get_rng_state(), [(buffer, buffer.clone()) for buffer in model.buffers()]
    for _ in range(WARM_UP):
        run()
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)
    if not torch.equal(drawn, torch.get_rng_state()):
        raise UsageError(
            f"engine.capture: stage {stage} draws random numbers on the host (a router's jitter), and a recording would repeat them. Set engine.capture=False, or draw none."
        )


def check_batch(stage: int, batch: Batch, context: Any) -> None:
    """UsageError for a micro-batch that no recording serves."""
    if any(len(lengths) > 1 for lengths in batch.lengths):
        raise UsageError(
            f"engine.capture: stage {stage} was given rows of several documents; a recording serves rows of one each. Set engine.capture=False."
        )
    if "patches_NC" in batch.extra:
        raise UsageError(
            f"engine.capture: stage {stage} was given images, whose sizes differ from batch to batch. Set engine.capture=False."
        )
    if type(context) is not TrainContext:
        raise UsageError(
            f"engine.capture: stage {stage} runs with a context of type {type(context).__name__}, which depends on the batch. Set engine.capture=False."
        )


class Recording:
    """One stage's forward and backward for one micro-batch at a time."""

    def __init__(
        self, stages: Stages, stage: int, inputs: Any, leaves: Sequence[Tensor], batch: Batch, windows: Sequence[int | None]
    ) -> None:
        part = stages.parts[stage]
        self._batch = _copy_of(batch)
        self._results: list[Tensor] = []
        self._sums: dict[str, Tensor] = {}
        self._form_out: Form | None = None
        self._seeds: list[Tensor] | None = None
        self.parameters = [
            parameter for parameter in _parameters_of(stages.model, part.blocks, part.first, part.last) if parameter.requires_grad
        ]
        if part.first:
            self._form, self._inputs = None, [self._batch.tokens_BS]
            given: Any = self._batch.tokens_BS
            self._differentiable: list[Tensor] = []
        else:
            form, tensors = form_of(inputs)
            self._form = form
            wanted = {id(leaf) for leaf in leaves}
            self._inputs = [tensor.detach().clone().requires_grad_(id(tensor) in wanted) for tensor in tensors]
            self._differentiable = [tensor for tensor in self._inputs if tensor.requires_grad]
            given = form.build(self._inputs)
        context = TrainContext.of(self._batch, windows)

        def compute() -> Any:
            with logical.micro_batch(1.0) as further:
                # Past the model's own hooks: its buckets are the schedule's, and those of its modules do nothing then.
                result = stages.model.forward(given, context, stage=part)
                result = stages.loss(stages.model, result, self._batch) if part.last else result  # type: ignore[arg-type]
            if further:
                raise UsageError(
                    f"engine.capture: stage {stage} adds sums of its own ({', '.join(sorted(further))}), which no recording can. Set engine.capture=False."
                )
            return result

        self._record(stage, stages.model, compute)

    def _record(self, stage: int, model: nn.Module, compute: Callable[[], Any]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                warm_up(stage, model, lambda: self._both(compute()))
            pool = torch.cuda.graph_pool_handle()
            torch.cuda.synchronize()
            self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            # Backward runs on a thread of its own, and so does the process group's watchdog.
            with torch.cuda.graph(self._forward, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._outputs_of(compute())
            with torch.cuda.graph(self._backward, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._given = self._gradients_of()
        except RuntimeError as error:
            cause = (str(error).splitlines() or [type(error).__name__])[0][:300]
            raise UsageError(f"engine.capture: stage {stage} cannot be recorded. Cause: {cause}. Set engine.capture=False.") from error
        torch.cuda.current_stream().wait_stream(stream)
        # What autograd kept has been recorded; only the memory must stay.
        self._results = [result.detach() for result in self._results]
        self._sums = {name: value.detach() for name, value in self._sums.items()}

    def _both(self, result: Any) -> None:
        self._outputs_of(result)
        self._gradients_of()

    def _outputs_of(self, result: Any) -> None:
        self._sums, self._form_out = {}, None
        if isinstance(result, LossSum):
            self._results, self._sums = [result.total], dict(result.sums)
        else:
            self._form_out, self._results = form_of(result)
        self._roots = [each for each in self._results if each.requires_grad]
        if self._seeds is None:
            self._seeds = [torch.ones_like(root) for root in self._roots]

    def _gradients_of(self) -> list[Tensor | None]:
        wanted = [*self._differentiable, *self.parameters]
        found: list[Tensor | None] = [None] * len(wanted)
        if self._roots and wanted:
            found[:] = torch.autograd.grad(self._roots, wanted, self._seeds, allow_unused=True)
        self._roots = []
        return found

    # ------------------------------------------------------------ every micro-batch

    def forward(self, inputs: Any, batch: Batch) -> Any:
        """The stage's result for these inputs, in the recording's memory: tensors that are differentiable say so, though no graph of autograd is behind them."""
        for mine, theirs in zip(_tensors_of(self._batch), _tensors_of(batch), strict=True):
            mine.copy_(theirs, non_blocking=True)
        if self._form is not None:
            with torch.no_grad():
                for mine, theirs in zip(self._inputs, form_of(inputs)[1], strict=True):
                    mine.copy_(theirs)
        self._forward.replay()
        if self._form_out is None:
            return LossSum(self._results[0], self._sums)
        leaves = self._form_out.leaves
        if not any(leaf.differentiable for leaf in leaves):
            # Nothing comes back that would say when this has been received.
            return self._form_out.build([each.clone() for each in self._results])
        return self._form_out.build(
            [each.detach().requires_grad_(leaf.differentiable) for leaf, each in zip(leaves, self._results, strict=True)]
        )

    @torch.no_grad()
    def backward(self, seeds: Sequence[Tensor | float]) -> list[Tensor]:
        """Add to the parameters' `.grad`; returns the inputs' gradients. `seeds` are those of the differentiable results, or the scale of the loss."""
        for mine, theirs in zip(self._seeds or (), seeds, strict=True):
            mine.copy_(theirs) if isinstance(theirs, Tensor) else mine.fill_(theirs)
        self._backward.replay()
        count = len(self._differentiable)
        for parameter, gradient in zip(self.parameters, self._given[count:], strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.add_(gradient)
        return [
            torch.zeros_like(leaf) if each is None else each.clone()
            for leaf, each in zip(self._differentiable, self._given[:count], strict=True)
        ]


class Recordings:
    """All recordings of a rank's stages: one is taken for a forward, and given back with its backward."""

    def __init__(self, windows: Sequence[int | None], graphs: Any) -> None:
        self._windows, self._graphs = windows, graphs
        self._free: dict[Hashable, list[Recording]] = defaultdict(list)

    def take(
        self, stages: Stages, stage: int, key: Hashable, inputs: Any, leaves: Sequence[Tensor], batch: Batch, context: Any
    ) -> Recording:
        """A free recording, or a new one."""
        check_batch(stage, batch, context)
        free = self._free[stage, key]
        if free:
            return free.pop()
        made = Recording(stages, stage, inputs, leaves, batch, self._windows)
        for graph in (made._forward, made._backward):
            self._graphs.add(graph)
        return made

    def give_back(self, stage: int, key: Hashable, recording: Recording) -> None:
        """Its micro-batch is done."""
        self._free[stage, key].append(recording)


def _parameters_of(model: nn.Module, blocks: Sequence[str], first: bool, last: bool) -> list[nn.Parameter]:
    """Those that a stage may use: its blocks', and, at an end of the model, those outside of all blocks."""
    every = model.regions().blocks  # type: ignore[operator]
    found: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        block = next((each for each in every if name.startswith(f"{each}.")), None)
        if block in blocks or (block is None and (first or last)):
            found[id(parameter)] = parameter
    return list(found.values())


def _tensors_of(batch: Batch) -> list[Tensor]:
    extra = [value for _, value in sorted(batch.extra.items()) if isinstance(value, Tensor)]
    return [batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.documents_BS, *extra]


def _copy_of(batch: Batch) -> Batch:
    extra = {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.extra.items()}
    tensors = {name: getattr(batch, name).clone() for name in ("tokens_BS", "labels_BS", "positions_BS", "documents_BS")}
    return dataclasses.replace(batch, extra=extra, **tensors)
