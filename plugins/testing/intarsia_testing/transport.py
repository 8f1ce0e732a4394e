"""Conformance of transports. Subclass, name your entry, run pytest; a failure says which promise is broken, in words.

    class TestRing(TransportConformance):
        entry = "my-distribution:ring"

The promises are those of `intarsia.contracts.Transport`, as `intarsia_testing.transport_promises` has them: a world of processes runs them all once, for
each size in `sizes`; each test reads what one of them found.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, ClassVar, cast

from intarsia.plugins import current

from intarsia_testing.base import Conformance
from intarsia_testing.promise import broken

_OUTCOMES: dict[tuple[str, str, int], dict[str, str | None]] = {}


class TransportConformance(Conformance):
    """Every promise of a transport, one test each.

    Set `entry`, `device` where it does not serve a CPU ("cuda": one GPU for each process), and `sizes`. Or override `make` when no entry offers the
    transport. The class stands at the top level of its file: the processes import the file to find it.
    """

    kind: ClassVar[str] = "transport"
    device: ClassVar[str] = "cpu"
    sizes: ClassVar[tuple[int, ...]] = (2, 3)
    timeout_s: ClassVar[float] = 600.0

    def make(self) -> Any:
        """The transport, on each rank."""
        return current().build(self.given_configs()[0])

    def test_serves_its_group(self) -> None:
        self._kept("serves")

    def test_serves_one_process(self) -> None:
        self._kept("serves_one")

    def test_gives_memory(self) -> None:
        self._kept("gives_memory")

    def test_gathers_parts_in_rank_order(self) -> None:
        self._kept("gathers")

    def test_gathers_pieces_of_memory(self) -> None:
        self._kept("gathers_pieces")

    def test_gathers_in_place(self) -> None:
        self._kept("gathers_in_place")

    def test_fence_orders_writes_before_gathers(self) -> None:
        self._kept("fence_orders_writes")

    def test_fence_orders_gathers_before_writes(self) -> None:
        self._kept("fence_orders_reads")

    def test_agrees_on_other_memory(self) -> None:
        self._kept("agrees_on_other_memory")

    def test_reduces_or_leaves_it(self) -> None:
        self._kept("reduces")

    def test_serves_communicators(self) -> None:
        self._kept("serves_communicators")

    def test_can_be_captured(self) -> None:
        self._kept("can_be_captured")

    def _kept(self, promise: str) -> None:
        for size in self.sizes:
            found = outcome(type(self), size)
            if promise not in found:
                broken(
                    promise,
                    f"with {size} processes it was not reached: {'; '.join(filter(None, found.values())) or 'the world ended early'}",
                )
            problem = found[promise]
            if problem is not None:
                broken(promise, f"with {size} processes: {problem}")


def outcome(examined: type[TransportConformance], size: int) -> dict[str, str | None]:
    """What a world of `size` processes found, by promise; run once for each class and size."""
    file = inspect.getfile(examined)
    key = (file, examined.__qualname__, size)
    if key not in _OUTCOMES:
        _OUTCOMES[key] = _run_world(file, examined, size)
    return _OUTCOMES[key]


def _run_world(file: str, examined: type[TransportConformance], size: int) -> dict[str, str | None]:
    with tempfile.TemporaryDirectory(prefix="transport-") as folder:
        processes = []
        for rank in range(size):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "INTARSIA_RENDEZVOUS": f"file://{folder}/store", **ranks}
            command = [sys.executable, "-m", "intarsia_testing.transport", file, examined.__qualname__, folder]
            with Path(folder, f"{rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        end, late = time.monotonic() + examined.timeout_s, []
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
        for rank in late:
            processes[rank].kill()
            processes[rank].wait()
        answer = Path(folder, "found.json")
        found = cast("dict[str, str | None]", json.loads(answer.read_text())) if answer.exists() else {}
        failed = [rank for rank, process in enumerate(processes) if process.returncode]
        if failed:
            said = Path(folder, f"{failed[0]}.log").read_text(errors="replace").strip().splitlines()[-1:]
            reason = f"ranks {late} did not end within {examined.timeout_s:g} s" if late else f"rank {failed[0]} failed: {' '.join(said)}"
            found["the world"] = f"promise `ends` is broken: {reason}"
        return found


def _child(file: str, name: str, folder: str) -> None:
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    from intarsia.comm import init_world
    from intarsia.device import select

    from intarsia_testing.transport_promises import examine

    examined = getattr(module, name)()
    comm = init_world(select(examined.device), 300.0)
    found = {}
    for promise, problem in examine(examined.make(), comm):
        found[promise] = problem
        if comm.rank == 0:
            unfinished = Path(folder, "found.part")
            unfinished.write_text(json.dumps(found))
            unfinished.rename(Path(folder, "found.json"))
    comm.barrier("all is examined")
    comm.close()


if __name__ == "__main__":
    code = 0
    try:
        _child(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips destructors of process groups whose peers may be gone already.
    os._exit(code)
