"""Rows on their way to other ranks while this one goes on with something else.

On CUDA the exchange runs on a stream of its own, in backward too: autograd runs a node on the stream of its forward. On a CPU a thread waits for the other ranks in forward, and
backward waits in line.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from intarsia.comm import Communicator
from torch import Tensor

from intarsia_parallel.collectives import exchange, exchanged


class Lane:
    """Where exchanges of one group run beside other work. Exchanges are in the order of their starts."""

    def __init__(self, comm: Communicator, overlap: bool) -> None:
        self.comm = comm
        self._overlap = overlap and comm.size > 1
        self._stream: Any = None
        self._thread: ThreadPoolExecutor | None = None

    def start(self, x_ND: Tensor, sends: Sequence[int], receives: Sequence[int], what: str) -> Crossing:
        """Send rows as `collectives.exchange` does. Nothing else of this group may run before `Crossing.wait`."""
        if not self._overlap:
            return Crossing(exchange(x_ND, sends, receives, self.comm, what))
        if x_ND.is_cuda:
            if self._stream is None:
                self._stream = torch.cuda.Stream(x_ND.device)
            self._stream.wait_stream(torch.cuda.current_stream(x_ND.device))
            with torch.cuda.stream(self._stream):
                rows = exchange(x_ND, sends, receives, self.comm, what)
            x_ND.record_stream(self._stream)
            return Crossing(rows, self._stream)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dispatch")
        future = self._thread.submit(exchanged, x_ND.detach(), sends, receives, self.comm, what)
        return ThreadCrossing(x_ND, future, (tuple(receives), tuple(sends), self.comm, f"{what}, backward"))


class Crossing:
    """Rows that another stream brings, or that are here."""

    def __init__(self, rows: Tensor, stream: Any = None) -> None:
        self._rows, self._stream = rows, stream

    def wait(self) -> Tensor:
        """The rows, for the current stream."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._rows.device)
            current.wait_stream(self._stream)
            self._rows.record_stream(current)
        return self._rows


class ThreadCrossing(Crossing):
    """Rows that a thread waits for."""

    def __init__(self, x_ND: Tensor, future: Future[Tensor], back: tuple[Any, ...]) -> None:
        self._x_ND, self._future, self._back = x_ND, future, back

    def wait(self) -> Tensor:
        """The rows, with the gradient of `exchange`."""
        return _Arrival.apply(self._x_ND, self._future, self._back)


class _Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, future: Future[Tensor], back: tuple[Any, ...]) -> Tensor:
        ctx.back = back
        return future.result()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return exchanged(grads[0], *ctx.back), None, None
