"""Conformance of sandboxes. Subclass, name your entry, run pytest; a failure says which promise is broken, in words.

    class TestCells(SandboxConformance):
        entry = "acme-cells:cells"

The promises are those of `intarsia_sandbox.contracts.Sandbox`. The kit runs small Python programs by `python`, the command of an interpreter in the sandbox. It tries the plainest ways
out; it is no proof that there is none. It imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_sandbox.contracts import Completed, Sandbox, SandboxLimits

from intarsia_testing.base import Conformance, heavy
from intarsia_testing.promise import broken, keep

Result = TypeVar("Result")


TRIES = 3
"""How often the loop may stand still before it is taken to be the sandbox's doing."""


class SandboxConformance(Conformance):
    """Every promise of `intarsia_sandbox.contracts.Sandbox`, one test each.

    Set `entry`, and `config` where settings have no defaults. Set `python` to the command of an interpreter in the sandbox, `limits` to bounds that a small program keeps.
    Override `failing` to give a sandbox that itself fails.
    """

    kind: ClassVar[str] = "sandbox"
    python: ClassVar[tuple[str, ...]] = (sys.executable, "-I", "-S")
    limits: ClassVar[SandboxLimits] = SandboxLimits(
        seconds=400.0, cpu_seconds=60.0, memory_bytes=256 << 20, file_bytes=4 << 20, output_bytes=4096
    )
    timeout_s: ClassVar[float] = 900.0

    # ------------------------------------------------------------ what is tested

    def sandbox(self) -> Sandbox:
        """A freshly built sandbox under test."""
        return current().build(self.given_configs()[0])

    def failing(self) -> Sandbox | None:
        """A sandbox that cannot run anything (its service is down, say). None where that cannot be brought about."""
        return None

    # ------------------------------------------------------------ help

    def wait(self, work: Awaitable[Result]) -> Result:
        """Run a coroutine to its end, bounded by `timeout_s`."""

        async def bounded() -> Result:
            return await asyncio.wait_for(work, self.timeout_s)

        try:
            return asyncio.run(bounded())
        except TimeoutError:
            broken("ends", f"nothing came back within {self.timeout_s:g} s.")

    def program(
        self, code: str, files: Mapping[str, str | bytes] | None = None, stdin: str = "", sandbox: Sandbox | None = None, **limits: Any
    ) -> Completed:
        """Run a Python program, with some limits set otherwise."""
        bounds = self.bounds(**limits)
        done = self.wait((sandbox or self.sandbox()).run([*self.python, "-c", code], files, stdin, bounds))
        keep("answers", isinstance(done, Completed), f"run() gives {done!r}, not an intarsia_sandbox.contracts.Completed.")
        return done

    def bounds(self, **changed: Any) -> SandboxLimits:
        """`limits`, some of them set otherwise."""
        return SandboxLimits(**{name: changed.get(name, getattr(self.limits, name)) for name in SandboxLimits.__dataclass_fields__})

    # ------------------------------------------------------------ promises about running

    def test_it_is_a_sandbox(self) -> None:
        """It has `run` and `confinement`, which says in words what confines."""
        sandbox = self.sandbox()
        keep("is a sandbox", isinstance(sandbox, Sandbox), f"{sandbox!r} lacks `run` or `confinement`.")
        words = sandbox.confinement()
        keep(
            "says what confines",
            isinstance(words, Mapping) and words and all(isinstance(item, str) and item for pair in words.items() for item in pair),
            f"confinement() gives {words!r}; it must say in words what confines, by what it is confined from.",
        )

    def test_target_imports_no_torch(self) -> None:
        """Environment workers are light processes."""
        if not self.entry:
            return
        module = self.found_entry().target.partition(":")[0]
        problem = heavy([module])
        keep("light", not problem, f"importing {module} {problem}.")

    def test_output_and_status(self) -> None:
        """Standard output, errors and the exit code come back, apart."""
        done = self.program("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
        found = (done.ended, done.status, done.output, done.errors, done.output_cut)
        keep("answers", found == ("exit", 3, "out\n", "err\n", False), f"a program that prints out and err and exits with 3 gives {done}.")
        keep("answers", done.seconds_s > 0, f"`seconds_s` is {done.seconds_s}.")

    def test_signals_are_told_apart_from_exits(self) -> None:
        """A program that a signal ended says so."""
        done = self.program("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        keep("answers", (done.ended, done.status) == ("signal", 9), f"a program that kills itself by signal 9 gives {done}.")

    def test_files_and_input(self) -> None:
        """The folder holds the files that were given and no others; standard input is what was given."""
        code = "import os, sys; print(sorted(os.listdir('.')), open('a/b.txt').read(), list(open('c', 'rb').read()), sys.stdin.read())"
        done = self.program(code, {"a/b.txt": "héllo", "c": b"\x00\xff"}, "héy\n")
        keep("files and input", done.output == "['a', 'c'] héllo [0, 255] héy\n\n", f"the files and the input come out as {done}.")

    def test_the_folder_is_new_each_time(self) -> None:
        """Files may be written, and are gone for the next command."""
        sandbox = self.sandbox()
        code = "import os; print(os.listdir('.')); open('left', 'w').write('x'); os.mkdir('d')"
        for _ in range(2):
            done = self.program(code, sandbox=sandbox)
            keep("holds nothing", (done.status, done.output) == (0, "[]\n"), f"the folder is not empty or not writable: {done}.")

    def test_commands_run_side_by_side(self) -> None:
        """One sandbox serves several commands at one time, and the loop goes on meanwhile."""
        sandbox = self.sandbox()
        code = "import sys, time; name = sys.stdin.read(); open('name', 'w').write(name); time.sleep(1.5); print(open('name').read())"

        async def together() -> tuple[list[Completed], int]:
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.01)
                    ticks += 1

            ticking = asyncio.ensure_future(tick())
            runs = (sandbox.run([*self.python, "-c", code], None, str(number), self.limits) for number in range(4))
            done = await asyncio.gather(*runs)
            ticking.cancel()
            return done, ticks

        # A machine that is busy elsewhere lets the loop stand still as well, but not every time.
        for _ in range(TRIES):
            done, ticks = self.wait(together())
            keep("side by side", [each.output for each in done] == ["0\n", "1\n", "2\n", "3\n"], f"four commands at one time give {done}.")
            if ticks > 5:
                return
        broken("never blocks", "the event loop stood still while commands ran.")

    def test_what_cannot_be_run_is_a_usage_error(self) -> None:
        """A program that does not exist, names that lead out of the folder, limits of nothing."""
        sandbox = self.sandbox()
        cases: dict[str, tuple[Sequence[str], Mapping[str, str], SandboxLimits]] = {
            "a program that does not exist": (["/no/such/program"], {}, self.limits),
            "an empty command": ([], {}, self.limits),
            "a file above the folder": ([*self.python, "-c", ""], {"../x": ""}, self.limits),
            "a file by an absolute name": ([*self.python, "-c", ""], {"/tmp/x": ""}, self.limits),
            "no time": ([*self.python, "-c", ""], {}, self.bounds(seconds=0.0)),
        }
        for what, (command, files, limits) in cases.items():
            try:
                done = self.wait(sandbox.run(command, files, "", limits))
            except UsageError:
                continue
            except Exception as error:
                broken("usage errors", f"{what} raises {type(error).__name__} ({error}), not UsageError.")
            broken("usage errors", f"{what} gives {done}, not UsageError.")

    # ------------------------------------------------------------ promises about limits

    def test_time_is_limited(self) -> None:
        """A command that sleeps is ended at `seconds`; one that computes at `cpu_seconds`."""
        begin = time.monotonic()
        done = self.program("import time; time.sleep(600)", seconds=1.0)
        keep("time is limited", done.ended == "seconds" and time.monotonic() - begin < 500, f"a command of 600 s with 1 s gives {done}.")
        done = self.program("while True: pass", seconds=600.0, cpu_seconds=1.0)
        keep("time is limited", done.ended == "cpu_seconds", f"a loop with 1 s of CPU time gives {done}.")

    def test_memory_is_limited(self) -> None:
        """A command that wants more memory than there is gets an error or is ended."""
        done = self.program("x = bytearray(512 << 20); print('taken')")
        keep("memory is limited", "taken" not in done.output and (done.ended, done.status) != ("exit", 0), f"512 MiB with 256 give {done}.")

    def test_files_are_limited(self) -> None:
        """What is written is bounded."""
        code = "for n in range(64): open(f'f{n}', 'wb', 0).write(bytes(1 << 20))\nprint('written')"
        done = self.program(code)
        keep("files are limited", "written" not in done.output, f"64 MiB of files with 4 give {done}.")

    def test_output_is_limited(self) -> None:
        """Of much output the first part is kept, which is said; a flood ends."""
        done = self.program("print('x' * 5000)")
        keep("output is cut", done.output_cut and done.output == "x" * 4096, f"5000 bytes of output with 4096 give {str(done)[:300]}.")
        done = self.program("import os\nwhile True: os.write(1, b'x' * 65536)", seconds=400.0, cpu_seconds=400.0)
        keep("output is limited", done.ended == "output" and done.output_cut, f"a flood of output gives {str(done)[:300]}.")
        keep("output is limited", len(done.output) <= 4096, "of a flood of output more is kept than the limit.")

    def test_broken_text_is_text(self) -> None:
        """Bytes that are no UTF-8 do not raise."""
        done = self.program("import sys; sys.stdout.buffer.write(b'a\\xff\\xfeb')")
        keep("output is text", done.output.startswith("a") and done.output.endswith("b"), f"bytes that are no UTF-8 give {done}.")

    # ------------------------------------------------------------ promises about confinement

    def test_nothing_is_left(self) -> None:
        """What a command left behind is gone when run returns."""
        marker = f"left-behind-{os.getpid()}-{time.time_ns()}"
        code = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import time; time.sleep(600)', {marker!r}], start_new_session=True)"
        self.program(code)
        keep("nothing is left", not processes_with(marker), "a child that the command left sleeps on.")

    def test_a_cancelled_command_is_gone(self) -> None:
        """Cancelling ends everything, and run raises CancelledError."""
        sandbox = self.sandbox()
        marker = f"cancelled-{os.getpid()}-{time.time_ns()}"

        async def cancel() -> None:
            task = asyncio.ensure_future(
                sandbox.run([*self.python, "-c", "import time; time.sleep(600)", marker], None, "", self.bounds(seconds=600.0))
            )
            for _ in range(5000):
                await asyncio.sleep(0.02)
                if processes_with(marker):
                    break
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                return
            broken("cancelling", "a cancelled run() raises no CancelledError.")

        self.wait(cancel())
        keep("nothing is left", not processes_with(marker), "a command goes on after its run() was cancelled.")

    def test_no_secret_gets_in(self) -> None:
        """Neither environment variables nor open files of this process are the command's."""
        os.environ["SANDBOX_KIT_SECRET"] = "kit-secret"
        held = os.open(__file__, os.O_RDONLY)
        os.set_inheritable(held, True)
        try:
            code = f"import os; print('kit-secret' in str(dict(os.environ)))\ntry: os.fstat({held}); print('open')\nexcept OSError: print('closed')"
            done = self.program(code)
        finally:
            del os.environ["SANDBOX_KIT_SECRET"]
            os.close(held)
        keep("no secret gets in", done.output == "False\nclosed\n", f"a variable or an open file of this process is the command's: {done}.")

    def test_no_network(self) -> None:
        """No server of this machine can be reached."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 3); print('connected')"
            done = self.program(code)
        keep("no network", "connected" not in done.output, "a command reaches a server on this machine.")

    def test_no_files_outside(self, tmp_path: Path) -> None:
        """Files of this machine cannot be read or written."""
        secret = tmp_path / "secret"
        secret.write_text("the secret")
        code = f"import os\ntry: print(open({str(secret)!r}).read())\nexcept OSError: print('no')\ntry: open({str(tmp_path / 'made')!r}, 'w')\nexcept OSError: print('no')"
        done = self.program(code)
        keep(
            "no files outside",
            done.output == "no\nno\n" and not (tmp_path / "made").exists(),
            f"files outside are read or written: {done}.",
        )

    def test_failures_are_the_sandboxes(self) -> None:
        """A sandbox that fails raises EnvironmentFailure of the boundary `sandbox`."""
        sandbox = self.failing()
        if sandbox is None:
            return
        try:
            done = self.wait(sandbox.run([*self.python, "-c", ""], None, "", self.limits))
        except EnvironmentFailure as error:
            keep("failures are typed", error.boundary == "sandbox", f"the boundary is {error.boundary!r}.")
        except Exception as error:
            broken(
                "failures are typed", f"{type(error).__name__} ({error}) reaches the environment: raise EnvironmentFailure('sandbox', ...)."
            )
        else:
            broken("failures are typed", f"a sandbox that cannot run anything gives {done}.")


def processes_with(marker: str) -> list[int]:
    """Processes of this machine that have `marker` among their arguments, besides this one; empty where that cannot be seen."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if marker.encode() in arguments and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found
