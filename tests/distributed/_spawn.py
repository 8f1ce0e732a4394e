"""Run a top-level function of a test file in n fresh processes that form one gloo world, and collect what they return.

    def work(world, text):            # in the test file, importable without side effects
        return world.gather_json(text)

    def test_it():
        assert spawn(work, 2, "a") == [["a", "a"]] * 2

`tests/distributed` is on pytest's path, so test files say `from _spawn import spawn`. Arguments and results are JSON. Processes meet through a
file, never a port; each has one thread. A process that does not end in time is killed, and the failure shows what every rank printed.

Limits are far above what a slow and busy machine needs: a test that waits for one sets its own where the wait begins (`alone_within`).
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Seconds that a rank waits for another one in a collective.
WORLD_TIMEOUT_S = 300.0


def spawn(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout_s: float = 600.0,
    world: bool = True,
    errors: bool = False,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Results by rank of `function(world, *arguments)`, or `function(*arguments)` without a process group where `world` is False (torchrun's
    variables and INTARSIA_RENDEZVOUS are set for the code under test).

    A rank that raises fails the test with its traceback; with `errors` each rank's entry is {"result": ...} or {"error": class name,
    "message": text, "seconds": until then}.
    """
    with tempfile.TemporaryDirectory(prefix="spawn-") as folder:
        Path(folder, "arguments.json").write_text(json.dumps(arguments))
        processes = []
        for rank in range(ranks):
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            environ |= {"LOCAL_WORLD_SIZE": str(ranks), "INTARSIA_RENDEZVOUS": f"file://{folder}/store", **(environment or {})}
            command = [
                sys.executable,
                __file__,
                inspect.getfile(function),
                function.__name__,
                folder,
                str(int(world)),
            ]
            with Path(folder, f"{rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT))
        end = time.monotonic() + timeout_s
        late = []
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
        for rank in late:
            processes[rank].kill()
            processes[rank].wait()
        outcomes, report = [], [f"ranks {late} did not end within {timeout_s:g} s"] if late else []
        for rank, process in enumerate(processes):
            answer = Path(folder, f"{rank}.json")
            outcome = json.loads(answer.read_text()) if answer.exists() else {"error": "exit", "message": str(process.returncode)}
            outcomes.append(outcome if errors else outcome.get("result"))
            if rank in late or ("error" in outcome and (not errors or outcome["error"] == "exit")):
                log_text = Path(folder, f"{rank}.log").read_text(errors="replace")[-4000:]
                report.append(f"--- rank {rank}, exit code {process.returncode}: {outcome.get('error')}\n{log_text}")
        if report:
            raise AssertionError("\n".join(report))
        return outcomes


@contextlib.contextmanager
def alone_within(world: Any, limit_s: float) -> Iterator[bool]:
    """Whether this is rank 0. It waits for others no longer than `limit_s` within the block, while the others live, do nothing and wait for its end: however long
    the ranks took to come here, and whatever they did before, only the calls within the block are bounded.
    """
    world.barrier("all are here")
    if world.rank == 0:
        world.set_timeout(limit_s)
        try:
            yield True
        finally:
            world.store.set("the end of rank 0", "")
    else:
        yield False
        world.store.wait(["the end of rank 0"], datetime.timedelta(seconds=WORLD_TIMEOUT_S))


def _child(file: str, name: str, folder: str, with_world: str) -> None:
    begin = time.monotonic()
    sys.path.insert(0, str(Path(__file__).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    arguments = json.loads(Path(folder, "arguments.json").read_text())
    communicator = None
    try:
        if with_world == "1":
            from intarsia.comm import init_world

            communicator = init_world("cpu", WORLD_TIMEOUT_S)
            begin = time.monotonic()
            arguments.insert(0, communicator)
        outcome = {"result": getattr(module, name)(*arguments)}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - begin}
    unfinished = Path(folder, f"{os.environ['RANK']}.part")
    unfinished.write_text(json.dumps(outcome))
    unfinished.rename(unfinished.with_suffix(".json"))
    if communicator is not None and "result" in outcome:
        communicator.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips destructors of process groups whose peers may be gone already.
    os._exit(int("error" in outcome))


if __name__ == "__main__":
    _child(*sys.argv[1:])
