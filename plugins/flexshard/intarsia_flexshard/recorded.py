"""Collectives of a bucket as CUDA graphs of their own: a start is one launch, which costs the host a fraction of the call itself.

Buffers are permanent, so what a call does never changes. Inside a larger capture the calls themselves are recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from intarsia.comm.prepared import GroupGather, GroupReduce
from torch import Tensor


class Recorded:
    """A prepared collective (`intarsia.comm.Prepared`, `PreparedReduce`) whose start has been recorded. `result` is what a reduction's start was recorded with."""

    def __init__(self, call: Any, result: Tensor | None) -> None:
        self._call, self._result = call, result
        self._graph = torch.cuda.CUDAGraph()
        call.comm.graphs.add(self._graph)
        stream, statistic = torch.cuda.Stream(), call.statistic
        before = statistic.calls, statistic.bytes
        with torch.cuda.stream(stream):
            # Other threads (the watchdog's) may go on meanwhile.
            self._graph.capture_begin(capture_error_mode="thread_local")
            self._run()
            self._graph.capture_end()
        # Recording has moved nothing.
        statistic.calls, statistic.bytes = before
        self._begin, self._replay, self._watch, self._record = call.begin, self._graph.replay, call.comm.watch_event, call.record

    def start(self, result: Tensor | None = None) -> None:
        """Begin."""
        if torch.cuda.is_current_stream_capturing():
            self._run()
        else:
            self._begin()
            self._replay()

    def wait(self) -> None:
        """Nothing: streams order what follows."""

    def watch(self, event: Any) -> None:
        """`event` has been recorded behind the last start: the group's limit of time holds for it."""
        self._watch(event, self._record)

    def _run(self) -> None:
        self._call.start() if self._result is None else self._call.start(self._result)


def record(call: Any, result: Tensor | None = None) -> Any:
    """`call`, recorded if it is a process group's, or a transport's that says `is_recordable`; else itself."""
    if isinstance(call, Recorded):
        return call
    can = isinstance(call, (GroupGather, GroupReduce)) or getattr(call, "is_recordable", False)
    return Recorded(call, result) if can else call
