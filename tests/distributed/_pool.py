"""Processes that form one gloo world and stay: they take one example after the other, so that hundreds of them need not start hundreds of processes.

    with Pool(3) as pool:
        answers = pool.run({"program": ..., "setting": ..., "flow": ...})        # by rank: what `_programs.compare` gives, or {"error": text}

A rank that fails or does not answer in time ends all of them; the next example gets new ones.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

# Seconds that a rank waits for another one, and the test for all of them.
WORLD_TIMEOUT_S, PATIENCE_S = 300.0, 600.0
# And for the others once one has failed: they wait for that one.
GRACE_S = 3.0
# A world is renewed after so many examples: each of them leaves groups behind.
RENEWED_AFTER = 50


class Pool:
    """See the module's text. A pool of one runs in this process."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._processes: list[subprocess.Popen[str]] = []
        self._answers: queue.Queue[tuple[int, str]] = queue.Queue()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def run(self, example: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The ranks' answers."""
        if self.ranks == 1:
            from intarsia.comm import SelfCommunicator

            return [answer(SelfCommunicator(), example)]
        if self._count >= RENEWED_AFTER:
            self.close()
        if not self._processes:
            self._start()
        self._count += 1
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(example) + "\n")
            process.stdin.flush()
        found: dict[int, dict[str, Any]] = {}
        failed = False
        while len(found) < self.ranks:
            try:
                rank, text = self._answers.get(timeout=GRACE_S if failed else PATIENCE_S)
            except queue.Empty:
                failed = True
                break
            found[rank] = json.loads(text)
            failed = failed or "error" in found[rank]
        if failed:
            self.close()
        return [found.get(rank, {"error": "no answer in time"}) for rank in range(self.ranks)]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pool-")
        for rank in range(self.ranks):
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks)}
            environ |= {"LOCAL_WORLD_SIZE": str(self.ranks), "INTARSIA_RENDEZVOUS": f"file://{self._folder.name}/store"}
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen([sys.executable, __file__], env=environ, text=True, **pipes)
            threading.Thread(target=_read, args=(process, rank, self._answers), daemon=True).start()
            self._processes.append(process)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._answers, self._count = [], queue.Queue(), 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _read(process: subprocess.Popen[str], rank: int, answers: queue.Queue[tuple[int, str]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            answers.put((rank, line))
    answers.put((rank, json.dumps({"error": f"the process has ended with {process.wait()}"})))


def answer(world: Any, example: Mapping[str, Any]) -> dict[str, Any]:
    """What `_programs.compare` says of an example, or the error."""
    from _programs import compare, sharder_of

    try:
        return compare(world, example["program"], example["setting"], example["flow"], sharder_of(example["setting"]))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}


def main() -> None:
    """A rank: examples from stdin, answers to stdout, one a line."""
    sys.path.insert(0, str(Path(__file__).parent))
    from intarsia.comm import init_world

    world = init_world("cpu", WORLD_TIMEOUT_S)
    for line in sys.stdin:
        print(json.dumps(answer(world, json.loads(line))), flush=True)
    # Skips destructors of process groups whose peers may be gone already.
    os._exit(0)


if __name__ == "__main__":
    main()
