"""A process group of two: a rank of the trainer and a reader of its weights. It is made for them alone and never the default group, so that one side's end is the end of this group and of no other.

Point-to-point is pairwise in gloo and in NCCL whatever a group's size (connections; communicators of two ranks), so a larger group would only tie to each other those who have nothing to say to
each other. Both sides meet at a store under an epoch that is drawn anew for each group; the one that comes back after its end has another.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from intarsia_rl.processes.variables import variables

TRAINER, READER = 0, 1

# Who fails a group is told by its error here. Torch's own watchdog would end the process, and with it all the others' groups.
_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_environment = threading.Lock()


def facts_of(device: torch.device) -> dict[str, Any]:
    """What the other side has to know of a device to choose a backend. JSON."""
    unit = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return {"type": device.type, "unit": unit, "nccl": dist.is_nccl_available()}


def obstacle(trainer: Mapping[str, Any], reader: Mapping[str, Any]) -> str:
    """Why the two devices (`facts_of`) cannot reach each other by NCCL; "" where they can."""
    for side, facts in (("the trainer", trainer), ("the generator", reader)):
        if facts["type"] != "cuda":
            return f"{side} has its tensors on the device {facts['type']!r}"
        if not facts["nccl"]:
            return f"{side}'s PyTorch was built without NCCL"
    return f"trainer and generator share one GPU ({trainer['unit']})" if trainer["unit"] == reader["unit"] else ""


class Pair:
    """A group over `backend`, "gloo" or "nccl". Making it is a collective of the two sides: each gives its `rank`, TRAINER or READER, and `address`, at which the other one reaches it.

    `control` is the connection by which they agreed: where it ends, a wait does. `device` is where this side keeps its tensors; those that are sent lie on the attribute `device`: the CPU with gloo. All methods raise OSError where the other side is
    gone, or says nothing for `timeout_s`; nothing but `end` may be called then. One thread uses it at a time.
    """

    def __init__(
        self,
        backend: str,
        store: dist.Store,
        epoch: str,
        rank: int,
        address: str,
        device: torch.device,
        control: socket.socket,
        timeout_s: float,
    ) -> None:
        self.backend, self.timeout_s = backend, timeout_s
        self.device = device if backend == "nccl" else torch.device("cpu")
        self.moved = 0
        self._peer, self._control = READER + TRAINER - rank, control
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._group: Any = None
        self._works: collections.deque[Any] = collections.deque()
        store = dist.PrefixStore(f"weights/{epoch}", store)
        make = self._gloo if backend == "gloo" else self._nccl
        try:
            self._group = _within(timeout_s, lambda: make(store, rank, address), control, "the other side has not come to the group")
            # The first word each way makes the connections.
            word = torch.zeros(1, dtype=torch.uint8, device=self.device)
            _within(timeout_s, lambda: self._greet(word, rank), control, "the other side does not answer in the group")
        except BaseException:
            self.end()
            raise

    def _gloo(self, store: dist.Store, rank: int, address: str) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # whose options have no stated type
        options = gloo._Options()
        options._timeout, options._threads = datetime.timedelta(seconds=self.timeout_s), 1
        options._devices = [gloo.create_device(hostname=address)]
        return gloo(store, rank, 2, options)

    def _nccl(self, store: dist.Store, rank: int, address: str) -> Any:
        torch.cuda.set_device(self.device)  # of this thread
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=self.timeout_s)
        with _environment, variables(_NCCL):  # is read as a group is made
            return dist.ProcessGroupNCCL(store, rank, 2, options)

    def _greet(self, word: Tensor, rank: int) -> None:
        for speaker in (TRAINER, READER):
            with self.stream():
                if rank == speaker:
                    self.send(word)
                else:
                    self.receive(word)
                self.wait()

    # ------------------------------------------------------------ tensors

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """On CUDA: the device that was given and a stream of its own are current, so that what is sent waits for nobody else's work, and they not for it."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):  # and its device
                yield

    def send(self, tensor: Tensor) -> None:
        """Begin to send a contiguous tensor; it must not change until its `wait` has returned."""
        self._begin(lambda: self._group.send([tensor], self._peer, 0))

    def receive(self, tensor: Tensor) -> None:
        """Begin to receive a contiguous tensor; it is there when its `wait` has returned."""
        self._begin(lambda: self._group.recv([tensor], self._peer, 0))

    def _begin(self, begin: Callable[[], Any]) -> None:
        try:
            self._works.append(begin())
        except RuntimeError as error:
            raise ConnectionError(_first_line(error)) from error

    def wait(self) -> None:
        """Until the oldest that was begun is done. TimeoutError after `timeout_s`."""
        try:
            if self.backend == "nccl":
                self._poll()
            self._works[0].wait(datetime.timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            late = "imed out" in str(error)
            raise (
                TimeoutError(f"nothing came or went for {self.timeout_s:g} s") if late else ConnectionError(_first_line(error))
            ) from error
        self._works.popleft()

    def _poll(self) -> None:
        """NCCL does not notice that the other process is gone; the connection does."""
        end, pause = time.monotonic() + self.timeout_s, 2e-5
        while not self._works[0].is_completed():
            if time.monotonic() > end:
                raise TimeoutError(f"nothing came or went for {self.timeout_s:g} s")
            if is_over(self._control):
                raise ConnectionError("the other process is gone")
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def settle(self) -> None:
        """Until nothing reads the tensors any more that were copied in `stream`."""
        if self._stream is not None:
            self._stream.synchronize()

    def end(self) -> None:
        """Leave; the other side's waits fail. May be called twice."""
        if self._group is not None and self.backend == "nccl":
            with contextlib.suppress(OSError, RuntimeError):
                _within(10.0, self._group.abort, None, "NCCL does not let go")
        # Gloo closes its connections when nobody has the group or anything that it was given to do: nobody but this object ever has.
        self._works.clear()
        self._group = None


def is_over(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection on which it has nothing to say."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN | select.POLLHUP)
        return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):  # It is closed here.
        return True


def _within(seconds: float, call: Callable[[], Any], control: socket.socket | None, otherwise: str) -> Any:
    """What a call gives that may hang in C code: then it is left alone. OSError where it fails, or does not return while `control` is open."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="weights-group", daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive():
        thread.join(min(0.1, max(0.0, end - time.monotonic())))
        if outcome:
            break
        if time.monotonic() >= end:
            raise TimeoutError(f"{otherwise} for {seconds:g} s")
        if control is not None and is_over(control):
            raise ConnectionError("the other process is gone")
    found, error = outcome[0]
    if isinstance(error, RuntimeError):
        raise ConnectionError(f"{otherwise}: {_first_line(error)}") from error
    if error is not None:
        raise error
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ---------------------------------------------------------------- pieces of bounded size


def send_parts(pair: Pair, parts: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    """Send tensors' bytes, one after the other, in pieces of at most a buffer; `pair.moved` counts those that have arrived. `buffers` are two, 1-D uint8, where the tensors lie: one is filled
    while the other is sent."""
    flying = torch.empty(0)
    pair.moved = 0
    with pair.stream():
        try:
            for piece in _packed(parts, buffers):
                moved = piece.to(pair.device)
                if flying.numel():
                    pair.wait()
                    pair.moved += flying.numel()
                pair.send(moved)
                flying = moved
            if flying.numel():
                pair.wait()
                pair.moved += flying.numel()
        finally:
            pair.settle()


def receive_into(pair: Pair, data: Tensor, limit: int) -> None:
    """Fill 1-D uint8 with what `send_parts` sends with buffers of `limit` bytes; `pair.moved` counts the bytes that are there."""
    pieces = data.split(limit) if data.numel() else ()
    pair.moved = 0
    with pair.stream():
        for number, piece in enumerate(pieces):
            # The next one may come while this one is waited for.
            for ahead in pieces[number + min(number, 1) : number + 2]:
                pair.receive(ahead)
            pair.wait()
            pair.moved += piece.numel()


def _packed(parts: Sequence[Tensor], buffers: Sequence[Tensor]) -> Iterator[Tensor]:
    """The parts' bytes in full buffers, in turn, but for the last."""
    number, used = 0, 0
    for part in parts:
        for flat in _flat(part, buffers[0].numel()):
            data = flat.view(torch.uint8)
            while data.numel():
                some = data[: buffers[number].numel() - used]
                buffers[number][used : used + some.numel()].copy_(some, non_blocking=True)
                used, data = used + some.numel(), data[some.numel() :]
                if used == buffers[number].numel():
                    yield buffers[number]
                    number, used = 1 - number, 0
    if used:
        yield buffers[number][:used]


def _flat(part: Tensor, limit: int) -> Iterator[Tensor]:
    """The elements of a box of a contiguous tensor in row-major order, as contiguous 1-D tensors. What has to be copied for that takes at most `limit` bytes at once."""
    if not part.numel():
        return
    if part.is_contiguous() or part.nbytes <= limit:
        yield part.contiguous().reshape(-1)
        return
    for some in part.split(max(1, limit // part[0].nbytes)):
        yield from _flat(some if some.nbytes <= limit else some[0], limit)
