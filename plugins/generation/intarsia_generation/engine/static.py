"""Steps of decoding in fixed shapes, which a CUDA graph holds: the host launches one thing for a step, whatever the number of kernels.

A step of one new token for each of n requests is computed as one of the next larger of a few sizes. Rows behind n belong to nobody: they stand at position 0 of a block, and of a place for states, that no request has.
What changes from step to step is n tokens, their positions, their requests' places, and the blocks they go into: one small copy to the device. Tables of blocks lie there (`PagedContext.show`), and a step enters its own
blocks into them itself.

A graph holds addresses: of caches, states, tables, parameters and buffers; and the kernels that were in force. Where one of these is another, all graphs are dropped and recorded anew when they are needed. Caches are
cleared, and weights are pushed, in place.

Shape suffixes: N rows of a step, D model width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from intarsia import ops
from intarsia.contracts import MixerSpec
from intarsia.errors import UsageError
from torch import Tensor, nn

from intarsia_generation.engine.context import PagedContext, Piece
from intarsia_generation.engine.routes import RouteCache

logger = logging.getLogger("intarsia.generation")

Graphs = Literal["auto", "on", "off", "eager"]
"""`auto`: where it is possible; `on`: an error where it is not; `eager`: the same steps in the same shapes on any device, launched one by one, which tests compare with graphs and without."""

# Runs before a size is recorded: libraries set themselves up, kernels are compiled and chosen, caches come into being.
WARM_UP = 2

WAITS = {"paged_attention": "it copies all entries that a request can have", "grouped_linear": "it reads the groups' sizes on the host"}
"""Operators whose reference no graph can or should hold, and why."""


class NotStatic(Exception):
    """Why steps cannot be in fixed shapes, or recorded."""


def sizes_up_to(most: int) -> tuple[int, ...]:
    """Rows of a step: 1, 2, 4, 8, then multiples of 8, above 64 of 16; `most` is the last."""
    sizes = {1, 2, 4, *range(8, min(most, 64) + 1, 8), *range(80, most + 1, 16)}
    return (*sorted(size for size in sizes if size < most), most)


def obstacles(model: nn.Module, specs: Mapping[str, MixerSpec], device: torch.device, ranks: int) -> list[str]:
    """Why no step of this model can be in fixed shapes; empty where nothing is in the way but, maybe, the kernels in force."""
    found = []
    if device.type != "cuda":
        found.append(f"the device is {device.type}, and graphs are recorded on CUDA")
    if ranks > 1:
        found.append(f"the model is cut over {ranks} processes (generator.tensor), which tell each other of every step")
    if latent := next((mixer for mixer, spec in specs.items() if spec.kind == "latent"), None):
        found.append(f"mixer {latent!r} keeps latents, of which a step gathers as many as there are")
    for name, module in model.named_modules():
        promises = getattr(getattr(module, "dispatcher", None), "capabilities", None)
        if promises is not None and (promises.needs_host_sync or not promises.static_shapes):
            what = "waits on the host for sizes" if promises.needs_host_sync else "makes shapes that depend on numbers"
            found.append(f"the dispatcher of {name}, {type(module.dispatcher).__name__}, {what}")
            break
    return found


class _Step:
    """One size: where its inputs lie, and what computes it."""

    def __init__(self, size: int, device: torch.device, sees: bool, nobody: tuple[int, int, int, int]) -> None:
        self.size = size
        self.host_4N = torch.tensor(nobody, dtype=torch.int64)[:, None].repeat(1, size)
        if device.type == "cuda":
            self.host_4N = self.host_4N.pin_memory()
        self.numbers = self.host_4N.numpy()
        self.line_4N = self.host_4N.to(device, copy=True)
        self.positions_3N = self.line_4N.new_zeros(3, size) if sees else None
        self.used = 0
        self.graph: Any = None
        self.hidden_ND: Tensor | None = None


class StaticSteps:
    """Computes steps of decoding where they can be in fixed shapes. Stability: provisional.

    `setting` is what the user wants; `ranks` how many processes have a part of the model. UsageError for `on` where something is in the way; what only a recording can find is one then, too.
    """

    def __init__(
        self, model: nn.Module, specs: Mapping[str, MixerSpec], context: PagedContext, routes: RouteCache, setting: Graphs, ranks: int = 1
    ) -> None:
        self._model, self._context, self._routes, self._setting = model, context, routes, setting
        self.device = context.device
        self._sizes = sizes_up_to(context.nobody)
        # A model that sees has positions on three axes, which differ from the tokens' numbers behind an image.
        self._sees = hasattr(model, "see")
        self._steps: dict[int, _Step] = {}
        self._held: tuple[Any, ...] = ()
        self._operators: tuple[ops.Operator, ...] = ()
        self._kernels: tuple[ops.Choice, ...] = ()
        self._pool: Any = None
        self._stream: Any = None
        self.reason = ""
        self.computed = 0
        problems = ["generator.graphs is off"] if setting == "off" else obstacles(model, specs, self.device, ranks)
        if setting == "eager":
            problems = [each for each in problems if "recorded on CUDA" not in each]
        if problems:
            self._give_up("; ".join(problems))

    @property
    def text(self) -> str:
        """What became of it, for people: why there are no graphs, or which sizes are recorded."""
        if self.reason:
            return f"none: {self.reason}"
        sizes = ", ".join(str(size) for size in sorted(self._steps)) or "none yet"
        return f"{'computed without graphs' if self._setting == 'eager' else 'recorded'} for {sizes} of at most {self._sizes[-1]} requests"

    # ------------------------------------------------------------ a step

    def hidden(self, pieces: Sequence[Piece], extra: Mapping[str, Any] | None) -> Tensor | None:
        """Hidden states [N, D] of one token of each piece, in memory that the next step overwrites; None where the step has to be computed as any other."""
        if extra is not None and (not self._sees or extra.keys() != {"positions_3N"}):
            return None
        self.look_at_kernels()
        if self.reason:
            self._insist()
            return None
        count = len(pieces)
        size = next(size for size in self._sizes if size >= count)
        step = self._steps.get(size)
        try:
            step = self._made(size) if step is None else step
        except NotStatic as problem:
            self._give_up(str(problem))
            return None
        self._context.show(pieces)
        self._fill(step, pieces, extra)
        self.computed += 1
        if step.graph is None:
            step.hidden_ND = self._compute(step)
        else:
            step.graph.replay()
        assert step.hidden_ND is not None, "a step that was made has a result"
        return step.hidden_ND[:count]

    def _fill(self, step: _Step, pieces: Sequence[Piece], extra: Mapping[str, Any] | None) -> None:
        """The step's inputs. Its host buffer is free: whoever asked for the last step has waited for its tokens since."""
        count, numbers, block = len(pieces), step.numbers, self._context.size
        starts = [piece.start for piece in pieces]
        numbers[0, :count] = [piece.tokens[0] for piece in pieces]
        numbers[1, :count] = starts
        numbers[2, :count] = [piece.row for piece in pieces]
        numbers[3, :count] = [piece.blocks[start // block] for piece, start in zip(pieces, starts, strict=True)]
        if count < step.used:
            numbers[:, count : step.used] = [[number] for number in self._nobody]
        step.used = count
        step.line_4N.copy_(step.host_4N, non_blocking=True)
        if step.positions_3N is not None:
            step.positions_3N.copy_(step.line_4N[1].expand(3, -1))
            if extra is not None:
                step.positions_3N[:, :count] = extra["positions_3N"]

    @property
    def _nobody(self) -> tuple[int, int, int, int]:
        """Token, position, place and block of a row that belongs to nobody."""
        return 0, 0, self._context.nobody, self._context.scratch

    def _compute(self, step: _Step) -> Tensor:
        """Everything that a graph holds."""
        tokens_N, positions_N, rows_N, blocks_N = step.line_4N.unbind()
        extra = None if step.positions_3N is None else {"positions_3N": step.positions_3N}
        tokens_N1 = self._context.begin_single(tokens_N, positions_N, rows_N, blocks_N, extra)
        with self._routes.recording(self._context.slots_N):
            hidden_N1D: Tensor = self._model(tokens_N1, self._context)
        return hidden_N1D.flatten(0, 1)

    # ------------------------------------------------------------ what graphs hold

    def refresh(self, why: str) -> None:
        """Something was done with weights or caches: drop graphs where these lie elsewhere than before."""
        if self._steps and self._held != self._addresses():
            self._drop(why)

    def look_at_kernels(self) -> None:
        """Drop graphs that hold other kernels than those in force now, and find out whether these can be recorded. UsageError where they cannot and the user insists."""
        if self.reason:
            return
        if not self._operators:
            self._operators = tuple(ops.operators().values())
        if len(self._kernels) == len(self._operators) and all(
            operator.choice is kernel for operator, kernel in zip(self._operators, self._kernels, strict=True)
        ):
            return
        self._drop("other kernels are in force")
        self._kernels = tuple(operator.choice for operator in self._operators)
        if problem := self._kernels_problem():
            self._give_up(problem)

    def _kernels_problem(self) -> str:
        """Which operator of the model runs its reference where no graph can hold that."""
        if self._setting == "eager":
            return ""
        uses = {"grouped_linear": any(hasattr(module, "dispatcher") for module in self._model.modules())}
        uses["paged_attention"] = self._context.has_softmax
        for operator in self._operators:
            if uses.get(operator.name) and operator.choice.function is None:
                return f"operator {operator.name} runs as its reference ({operator.choice.reason}), and {WAITS[operator.name]}"
        return ""

    def _addresses(self) -> tuple[Any, ...]:
        """Where parameters, buffers, caches and states lie."""
        tensors = (*self._model.parameters(), *self._model.buffers(), *self._context.kept())
        return tuple(tensor.data_ptr() for tensor in tensors)

    def _drop(self, why: str) -> None:
        if not self._steps:
            return
        logger.info("Recorded steps are dropped: %s", why)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._steps.clear()
        # A pool whose last graph is gone cannot be given another one.
        self._pool = None

    def _give_up(self, why: str) -> None:
        self._drop(why)
        self.reason = why
        self._insist()
        log = logger.debug if self._setting == "off" or self.device.type != "cuda" else logger.warning
        log("Steps of decoding are computed without CUDA graphs: %s", why)

    def _insist(self) -> None:
        """UsageError where the user does."""
        if self._setting == "on":
            raise UsageError(
                f"generator.graphs=on: steps of decoding cannot be recorded: {self.reason}. Set generator.graphs=auto to go without."
            )

    # ------------------------------------------------------------ recording

    def _made(self, size: int) -> _Step:
        """A step of this size, of rows that belong to nobody. NotStatic where it cannot be recorded."""
        step = _Step(size, self.device, self._sees, self._nobody)
        if self._setting == "eager":
            step.hidden_ND = self._compute(step)
        else:
            self._record(step)
        self._held = self._addresses()
        self._steps[size] = step
        return step

    def _record(self, step: _Step) -> None:
        here = torch.cuda.current_stream(self.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.device), ops.installed(self._strict()):
                with torch.cuda.stream(self._stream):
                    for _ in range(WARM_UP):
                        self._compute(step)
                # Other threads, as the watchdog of a process group, may go on meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    step.hidden_ND = self._compute(step)
        except RuntimeError as error:
            self._clean_up(here)
            cause = (str(error).splitlines() or [type(error).__name__])[0][:300]
            raise NotStatic(f"a step of {step.size} requests cannot be recorded ({cause})") from error
        here.wait_stream(self._stream)
        step.graph = graph

    def _clean_up(self, here: Any) -> None:
        """A recording that fails leaves its stream in force, and the allocator in the belief that it goes on."""
        torch.cuda.set_stream(here)
        with contextlib.suppress(RuntimeError, AttributeError):  # unless it was ended
            torch._C._cuda_endAllocateToPool(here.device_index, self._pool)

    def _strict(self) -> dict[str, ops.Choice]:
        """The kernels in force for operators whose reference would do harm, which say so where they would leave a call to it."""
        found = {}
        for operator in self._operators:
            function = operator.choice.function
            if operator.name in WAITS and function is not None and hasattr(function, "supports"):
                found[operator.name] = dataclasses.replace(operator.choice, function=functools.partial(_strictly, operator.choice))
        return found


def _strictly(kernel: ops.Choice, *arguments: Any, **named: Any) -> Any:
    function: Any = kernel.function
    if reason := function.supports(*arguments, **named):
        raise NotStatic(f"kernel {kernel.kernel} cannot take its calls ({reason})")
    return function(*arguments, **named)
