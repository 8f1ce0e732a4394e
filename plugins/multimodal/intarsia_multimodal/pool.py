"""Worker processes, each served by a thread of this one. Jobs wait in a bounded queue: who brings more than there is room for is held up."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

from intarsia.errors import IntarsiaError, PluginError
from intarsia.plugins import child_environment

from intarsia_multimodal import wire
from intarsia_multimodal.making import Row
from intarsia_multimodal.worker import KINDS

Answer = tuple[dict[str, Any], Row | None]
COMMAND = (sys.executable, "-P", "-m", "intarsia_multimodal.worker")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Pool:
    """`count` workers, started with `setup`. Where one dies, or does not answer within `timeout_s`, all jobs fail with an error that says so. Close it at the end."""

    def __init__(self, count: int, setup: dict[str, Any], timeout_s: float):
        self._setup, self._timeout_s = setup, timeout_s
        self._failure: IntarsiaError | None = None
        self._jobs: queue.Queue[tuple[dict[str, Any], Future[Answer]]] = queue.Queue(2 * count)
        self._guard = threading.Lock()
        kept = {key: value for key, value in os.environ.items() if key not in OF_RANKS}
        environment = {**kept, **child_environment(), **dict.fromkeys(THREADS, "1")}
        self.processes = [
            # In a session of its own, so that an interrupt from the keyboard is the run's to handle.
            subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0, start_new_session=True)
            for _ in range(count)
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=(number, process), name=f"intarsia-media-{number}", daemon=True)
            for number, process in enumerate(self.processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: dict[str, Any]) -> Future[Answer]:
        """Have a job done. Waits while the queue is full. Errors: in the future; here, where a worker has died before."""
        future: Future[Answer] = Future()
        while True:
            if self._failure is not None:
                raise self._failure
            with contextlib.suppress(queue.Full):
                self._jobs.put((job, future), timeout=0.2)
                break
        if self._failure is not None:  # it came between
            self._fail_waiting()
        return future

    def close(self) -> None:
        """End the processes. What is not done fails."""
        self._fail(PluginError("The worker processes are closed."))
        for process in self.processes:
            process.kill()
        for process, thread in zip(self.processes, self._threads, strict=True):
            thread.join()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _serve(self, number: int, process: subprocess.Popen[bytes]) -> None:
        """Hand jobs to one worker until it, or the pool, is at its end."""
        try:
            self._ask(number, process, self._setup)
        except IntarsiaError as error:
            self._fail(error)
        while self._failure is None:
            try:
                item = self._jobs.get(timeout=0.2)
            except queue.Empty:
                continue
            job, future = item
            try:
                future.set_result(self._ask(number, process, job))
            except BaseException as error:
                if isinstance(error, _Ended) or not isinstance(error, IntarsiaError):
                    self._fail(PluginError(str(error)))
                future.set_exception(error)
        self._fail_waiting()

    def _ask(self, number: int, process: subprocess.Popen[bytes], job: dict[str, Any]) -> Answer:
        """A worker's answer. Errors: those of the job; _Ended where there is none."""
        assert process.stdin is not None and process.stdout is not None
        try:
            wire.send(process.stdin.fileno(), job)
            message, row = wire.receive(process.stdout.fileno(), self._timeout_s)
        except (OSError, ValueError, EOFError) as error:
            raise self._ended(number, process, job, error) from error
        if "error" in message:
            raise KINDS[message["error"]](message["text"])
        return message, row

    def _ended(self, number: int, process: subprocess.Popen[bytes], job: dict[str, Any], error: BaseException) -> _Ended:
        """What is to be said where a worker gives no answer."""
        what = (
            f"it had documents {job['pieces']} (source, document, tokens, patches) to read" if "pieces" in job else "it was being started"
        )
        what = f"it had documents {job['prepare']} (source, first, behind the last) to prepare" if "prepare" in job else what
        if isinstance(error, TimeoutError):
            return _Ended(
                f"Worker {number} (process {process.pid}) has not answered for {self._timeout_s:g} s; {what}. Raise data.loader.worker_timeout_s, or look at these documents' media."
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        code = process.returncode
        how = "is broken" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return _Ended(
            f"Worker {number} (process {process.pid}) {how}; {what}. The system may have been out of memory (lower data.loader.workers or data.prefetch), or one of these "
            "media ends its decoder (data.loader.workers=0 shows which)."
        )

    def _fail(self, error: IntarsiaError) -> None:
        """All that waits, and all that comes, fails; the first reason counts."""
        with self._guard:
            if self._failure is None:
                self._failure = error
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        while True:
            try:
                item = self._jobs.get_nowait()
            except queue.Empty:
                return
            if self._failure is not None:
                item[1].set_exception(self._failure)


class _Ended(PluginError):
    """A worker that gives no answer."""
