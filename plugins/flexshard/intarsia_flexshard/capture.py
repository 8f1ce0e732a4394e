"""A whole training step as one CUDA graph.

    step = CapturedStep(sharded, run, (tokens, labels))
    loss = step(tokens, labels)

`run(*inputs)` does everything that a step does: forward, backward, `finish_gradients(wait=False)`, `update`, `zero_gradients`. It must read nothing from the host
that changes: no `.item()`, a learning-rate factor as a tensor, the same modules and shapes every time. A captured step begins and ends with all streams joined; the
gathers of the next step's first buckets are its last work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_flexshard.runtime import FlexShardModel


class CapturedStep:
    """See the module's text. `warmup` steps are run (and count as training steps) before the capture, which only records.

    Raises UsageError where there is no CUDA device, and for inputs of another number, shape or dtype than the captured ones. Stability: provisional.
    """

    def __init__(self, sharded: FlexShardModel, run: Callable[..., Any], inputs: Sequence[Tensor], warmup: int = 3) -> None:
        if not sharded.lanes.on_device:
            raise UsageError("A step can be captured on a CUDA device only. Run it as it is on a CPU.")
        self._sharded, self._inputs = sharded, [tensor.clone() for tensor in inputs]
        sharded.self_contained = True
        sharded.keep_halves()  # What a graph's memory held once is never given back.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(max(warmup, 1)):
                run(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        sharded.buckets[0].groups.reduce.graphs.add(self._graph)
        # Backward runs on a thread of its own, and so does the process group's watchdog.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._output = run(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        """Run the step on these inputs. What it returns lives in the graph's memory and is overwritten by the next call."""
        if len(inputs) != len(self._inputs):
            raise UsageError(f"The step was captured for {len(self._inputs)} inputs, and was given {len(inputs)}.")
        for mine, given in zip(self._inputs, inputs, strict=True):
            if mine.shape != given.shape or mine.dtype != given.dtype:
                raise UsageError(
                    f"The step was captured for an input of shape {tuple(mine.shape)} and {mine.dtype}, and was given {tuple(given.shape)} and {given.dtype}. "
                    "Capture one step for each shape."
                )
            mine.copy_(given, non_blocking=True)
        self._graph.replay()
        self._sharded.buckets[0].groups.reduce.watch("the captured step")
        return self._output
