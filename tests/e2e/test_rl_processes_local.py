"""Real processes of the launcher `local_processes`: they say why they cannot start, they end with their starter, and pools live on when they die."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from intarsia import plugins
from intarsia.config import resolve
from intarsia.contracts import Task, Turn
from intarsia.contracts.environment import EnvironmentFailure
from intarsia.errors import DistributedError, PluginError, UsageError
from intarsia_rl.contracts import Generated, GeneratorFacts, ProcessDied, ProcessLauncher, Request, Sampling
from intarsia_rl.controller.groups import Player
from intarsia_rl.controller.rollout import Rules, Try
from intarsia_rl.processes.codec import MessageTooLarge
from intarsia_rl.processes.config import LocalProcessesConfig
from intarsia_rl.processes.failures import RemoteError
from intarsia_rl.processes.local import LocalProcesses
from intarsia_rl.processes.pools import GeneratorPool, WorkerPool
from intarsia_rl.processes.routing import LeastLoaded
from intarsia_rl.processes.sync import BlockingProcess
from intarsia_rl.processes.wire import Connection
from intarsia_testing import rl_doubles
from intarsia_testing.rl_doubles import MisbehavesConfig, ScriptedConfig
from intarsia_testing.rollout_doubles import MergingRenderer, published

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher is tested where it is used")

TOOLS = """
import asyncio, os, subprocess, sys, time

class Tools:
    def __init__(self, word):
        self.word, self.seen = word, []

    def connected(self, send):
        self.send = send

    async def facts(self):
        return {"word": self.word, "torch": "torch" in sys.modules, "threads": os.environ.get("OMP_NUM_THREADS"), "rank": os.environ.get("RANK"), "pid": os.getpid()}

    async def echo(self, value):
        return value

    async def count(self, to):
        for number in range(to):
            self.send("number", number)
        return to

    async def wait(self, seconds, word=""):
        self.seen.append(f"begun{word}")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.seen.append(f"cancelled{word}")
            raise

    async def seen_words(self):
        return self.seen

    async def fail(self, kind):
        if kind == "cancel":
            raise asyncio.CancelledError
        raise {"key": KeyError("k"), "exit": SystemExit(4), "interrupt": KeyboardInterrupt()}[kind]

    async def object(self):
        return object()

    async def shout(self, lines):
        for number in range(lines):
            print("line", number, "x" * 300)

    async def child(self):
        return subprocess.Popen(["sleep", "3600"]).pid

    async def nest(self):
        from intarsia_rl.processes.local import LocalProcesses
        self.nested = await LocalProcesses().start("nested", "process_tools:serve", {})
        return [self.nested.pid, await self.nested.call("child")]

    async def block(self):
        import re
        re.match("(a*)*b", "a" * 60)  # for ages, in C, holding the interpreter's lock

    async def leave(self, how):
        print("last words", flush=True)
        os.abort() if how == "abort" else os._exit(9)

    def plain(self):
        return 1

    async def close(self):
        print("closed", flush=True)
        if self.word == "stay":
            time.sleep(3600)

async def serve(word="w"):
    return Tools(word)

async def refuse(error="usage"):
    from intarsia.errors import UsageError
    raise UsageError("there is no such thing here") if error == "usage" else MemoryError("too little")

async def never():
    await asyncio.sleep(3600)
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """The module of services, on the path of the processes."""
    folder = tmp_path / "services"
    folder.mkdir()
    (folder / "process_tools.py").write_text(textwrap.dedent(TOOLS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("RANK", "3")
    return "process_tools:"


def gone(pid: int, seconds: float = 600.0) -> bool:
    """Whether a process ends within some seconds (a zombie has ended)."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


async def sees(process, word: str) -> None:
    """Wait until the service has noted a word."""
    async with asyncio.timeout(600.0):
        while word not in await process.call("seen_words"):
            await asyncio.sleep(0.01)


def test_calls_answers_messages_and_failures(tools):
    async def main():
        launcher = plugins.current().build(LocalProcessesConfig(message_bytes=1 << 20))
        assert isinstance(launcher, ProcessLauncher)
        process = await launcher.start("tools", f"{tools}serve", {"word": "hello"}, threads=3)
        facts = await process.call("facts")
        assert facts == {"word": "hello", "torch": False, "threads": "3", "rank": None, "pid": process.pid}
        turn = Turn("assistant", "hi", tuple(range(1000)))
        assert await process.call("echo", [turn, b"\0" * 100, {"a": (1.5,)}]) == [turn, b"\0" * 100, {"a": (1.5,)}]

        heard: list[tuple[str, int]] = []
        assert await process.call("count", 3) == 3
        process.on_message(lambda kind, value: heard.append((kind, value)))
        assert await process.call("count", 2) == 2
        assert heard == [("number", number) for number in (0, 1, 2, 0, 1)]

        for kind, words in (
            ("key", "KeyError: 'k'"),
            ("exit", "SystemExit: 4"),
            ("interrupt", "KeyboardInterrupt"),
            ("cancel", "CancelledError"),
        ):
            with pytest.raises(RemoteError, match=words) as caught:
                await process.call("fail", kind)
            assert "process_tools.py" in caught.value.trace
        for method in ("plain", "_send", "nothing", "word"):
            with pytest.raises(PluginError, match=f"no async method '{method}'"):
                await process.call(method)

        with pytest.raises(MessageTooLarge, match="1,048,576 is the limit"):
            await process.call("echo", "x" * (1 << 21))
        with pytest.raises(PluginError, match=r"the answer to `object` cannot be sent: .*builtins.object"):
            await process.call("object")

        with pytest.raises(TimeoutError, match=r"no answer of tools in 0.05 s"):
            await process.call("wait", 3600.0, timeout_s=0.05)
        call = asyncio.ensure_future(process.call("wait", 3600.0, " twice"))
        await sees(process, "begun twice")
        call.cancel()
        await sees(process, "cancelled twice")

        slow, quick = asyncio.ensure_future(process.call("wait", 3600.0)), process.call("echo", 1)
        assert await quick == 1 and not slow.done()
        dying = asyncio.ensure_future(process.died())
        await process.stop()
        await process.stop()
        with pytest.raises(ProcessDied, match="tools is gone: it was stopped"):
            await slow
        with pytest.raises(ProcessDied, match="stopped"):
            await process.call("facts")
        await asyncio.sleep(0)
        assert not dying.done()
        dying.cancel()
        assert gone(facts["pid"])

    asyncio.run(main())


def test_what_a_process_says_that_cannot_start_is_shown(tools):
    async def main():
        launcher = LocalProcesses(LocalProcessesConfig(start_s=600.0))
        starts = [
            (f"{tools}refuse", {}, UsageError, "tools cannot start: there is no such thing here"),
            (f"{tools}refuse", {"error": "memory"}, RemoteError, "tools cannot start: MemoryError: too little"),
            ("no_such_module:serve", {}, PluginError, "tools cannot start: .*ModuleNotFoundError: No module named 'no_such_module'"),
            (f"{tools}nothing", {}, PluginError, "process_tools has no 'nothing'"),
            ("os:_exit", {"status": 5}, DistributedError, "tools ended while it started: it ended with exit code 5"),
            (
                "os:abort",
                {},
                DistributedError,
                "(?s)tools ended while it started: it was ended by SIGABRT; its last words:.*Fatal Python error",
            ),
        ]

        async def one(service, arguments, error, words):
            with pytest.raises(error, match=words):
                await launcher.start("tools", service, arguments)

        await asyncio.gather(*(one(*start) for start in starts))
        with pytest.raises(DistributedError, match=r"tools did not start within 1 s \(start_s"):
            await LocalProcesses(LocalProcessesConfig(start_s=1.0)).start("tools", f"{tools}never", {})

    asyncio.run(main())


# In a process of its own, in which nobody else opens and closes.
CANNOT = """
import asyncio, os, sys
from intarsia_rl.processes.local import LocalProcesses

async def main():
    held = [os.listdir("/proc/self/fd")]
    try:
        await LocalProcesses().start("tools", "process_tools:serve", {})
    except OSError as error:
        held += [os.listdir("/proc/self/fd"), type(error).__name__]
    return held

sys.executable = "/nowhere/python"
before, after, error = asyncio.run(main())
assert error == "FileNotFoundError" and before == after, (before, after, error)
"""


def test_what_was_opened_for_a_process_that_cannot_be_made_is_closed(tools):
    done = subprocess.run([sys.executable, "-c", CANNOT], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_a_process_with_other_plugins_is_refused(tools, tmp_path, monkeypatch):
    """The parent holds a plugin that its child cannot see."""
    loaded = rl_doubles.offered(tmp_path / "site", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "services"))
    plugins.use(loaded)
    try:
        with pytest.raises(
            PluginError, match=r"tools cannot start: this process does not hold the plugins .*acme-rl-doubles/doubles 1.0 is missing"
        ):
            asyncio.run(LocalProcesses().start("tools", f"{tools}serve", {}))
    finally:
        plugins.use(None)


@pytest.mark.parametrize("how", ["exit", "abort", "kill"])
def test_a_death_is_told_with_last_words_and_takes_what_it_started_along(tools, how, tmp_path):
    async def main():
        launcher = LocalProcesses(LocalProcessesConfig(log_folder=str(tmp_path / "logs")))
        process = await launcher.start("tools", f"{tools}serve", {})
        child = await process.call("child")
        waiting = asyncio.ensure_future(process.call("wait", 3600.0))
        await process.call("shout", 1000)
        if how == "kill":
            os.kill(process.pid, signal.SIGKILL)
            words = "it was ended by SIGKILL, out of memory or killed by hand"
        else:
            with pytest.raises(ProcessDied):
                await process.call("leave", how)
            words = "it ended with exit code 9" if how == "exit" else "it was ended by SIGABRT"
        reason = await asyncio.wait_for(process.died(), 600)
        assert reason.startswith(words) and "line 999" in reason and reason.count("\n") <= 41
        with pytest.raises(ProcessDied, match=words):
            await waiting
        with pytest.raises(ProcessDied, match=words):
            await process.call("facts")
        assert gone(child)
        await process.stop()
        log = (tmp_path / "logs" / "tools.log").read_text()
        assert "line 0 " in log and "line 999 " in log

    asyncio.run(main())


def test_a_process_that_hangs_is_killed_when_it_is_stopped(tools):
    async def main():
        launcher = LocalProcesses()
        hanging, staying = await asyncio.gather(
            launcher.start("hanging", f"{tools}serve", {}), launcher.start("staying", f"{tools}serve", {"word": "stay"})
        )
        blocked = asyncio.ensure_future(hanging.call("block"))
        begin = time.monotonic()
        await asyncio.gather(hanging.stop(0.3), staying.stop(0.3))
        assert time.monotonic() - begin < 500.0
        with pytest.raises(ProcessDied):
            await blocked

    asyncio.run(main())


STARTER = """
import asyncio, sys
from intarsia_rl.processes.local import LocalProcesses

async def main():
    processes = [await LocalProcesses().start(f"p{number}", "process_tools:serve", {}) for number in range(2)]
    child = await processes[0].call("child")
    blocked = asyncio.ensure_future(processes[1].call("block"))
    await asyncio.sleep(0.2)
    print(*(process.pid for process in processes), child, *await processes[0].call("nest"), flush=True)
    if sys.argv[1] == "raise":
        raise RuntimeError("the starter's end")
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_no_process_outlives_its_starter(tools, how):
    """Neither one that hangs in C code, nor what a process has started itself, nor the processes of a process."""
    starter = subprocess.Popen([sys.executable, "-c", STARTER, how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert starter.stdout is not None
        pids = [int(pid) for pid in starter.stdout.readline().split()]
        assert len(pids) == 5
        if how == "kill":
            assert not any(gone(pid, 0.05) for pid in pids)
            starter.kill()
        assert all(gone(pid) for pid in pids)
    finally:
        starter.kill()
        starter.wait()
        starter.stdout.close()


def test_a_starter_whose_connection_ends_before_its_lifeline(tools):
    """As the system closes them, one by one: what the process has started ends all the same."""
    ours, theirs = socket.socketpair()
    line, hold = os.pipe()
    command = [sys.executable, "-P", "-m", "intarsia_rl.processes", "by-hand", "--inherited", str(theirs.fileno()), "--lifeline", str(line)]
    environment = {**os.environ, **plugins.child_environment()}
    process = subprocess.Popen(
        [*command, "--limit", "100000"],
        env=environment,
        pass_fds=(theirs.fileno(), line),
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )

    async def started() -> int:
        connection = await Connection.over(ours, 100_000)
        await connection.send(["start", 1, f"{tools}serve", {}])
        assert await connection.receive() == ["result", 1, None]
        await connection.send(["call", 2, "child", []])
        _, _, pid = await connection.receive()
        connection.close()
        return pid

    theirs.close()
    os.close(line)
    child = asyncio.run(started())
    try:
        assert not gone(child, 0.3)
        os.close(hold)
        assert gone(child) and gone(process.pid)
    finally:
        process.kill()
        process.wait()
        if not gone(child, 0.1):
            os.kill(child, signal.SIGKILL)


def test_without_an_event_loop(tools):
    process = BlockingProcess.start(LocalProcesses(), "tools", f"{tools}serve", {"word": "sync"})
    heard: list[int] = []
    process.on_message(lambda kind, value: heard.append(value))
    assert process.call("facts")["word"] == "sync" and process.dead is None
    assert process.call("count", 3) == 3
    assert heard == [0, 1, 2]
    with pytest.raises(TimeoutError, match="no answer of tools"):
        process.call("wait", 3600.0, timeout_s=0.05)
    with pytest.raises(ProcessDied, match="exit code 9"):
        process.call("leave", "exit")
    assert process.dead is not None and "last words" in process.dead
    process.stop()
    process.stop()
    with pytest.raises(UsageError, match="no such thing"):
        BlockingProcess.start(LocalProcesses(), "tools", f"{tools}refuse", {})


# ---------------------------------------------------------------- environment workers


@pytest.fixture
def entries(tmp_path, monkeypatch):
    plugins.use(rl_doubles.offered(tmp_path / "site", monkeypatch))
    yield
    plugins.use(None)


def task_that(**deeds: str) -> Task:
    return Task("train/x", deeds)


ACTION = Turn("assistant", "a", (1, 2))


def test_workers_whose_environment_does_its_worst(entries, tmp_path):
    """One after the other on one worker, with another episode beside it that goes well where the worker lives on."""

    async def main():
        once = tmp_path / "once"
        pool = await WorkerPool.start(LocalProcesses(), MisbehavesConfig(once=str(once)), 1, ping_s=600.0)
        assert [task.id for task in await pool.tasks("train")] == [f"train/{number}" for number in range(4)]
        expected = {
            "raise": ("environment: step: KeyError: 'the key'", False, 0),
            "flood": (
                r"environment: what step gave is not sent on: the message has at least 67,\d+,\d+ bytes, and 16,777,216 is the limit. An environment cuts",
                False,
                0,
            ),
            "hang": ("environment: step: no answer of environment in 1 s", True, 0),
            "stay": ("environment: step: no answer of environment in 1 s", True, 0),
            "leave": ("environment: step: SystemExit: enough", False, 0),
            "exit": (
                "environment: step: environment is gone: it ended with exit code 3; its last words:\n  | the worker's last words",
                True,
                1,
            ),
            "block": ("environment: step: no answer of environment in 1 s: an episode of task 'train/x' blocked it", False, 1),
        }
        kills = 0
        for deed, (words, retry, deaths) in expected.items():
            once.unlink(missing_ok=True)
            kills += deaths
            bad, good = pool.episode(task_that(do=deed), 0), pool.episode(task_that(), 1)
            await asyncio.gather(bad.reset(), good.reset())
            # What does not end has a limit; only what never answers is asked for a sign of life that soon.
            bad.timeout_s, pool.ping_s = (1.0 if "no answer" in words else 600.0), (2.0 if deed == "block" else 600.0)
            with pytest.raises(EnvironmentFailure, match=words) as caught:
                await bad.step(ACTION)
            assert caught.value.retry is retry, deed
            await bad.close()
            if deaths:
                with pytest.raises(EnvironmentFailure, match="environment: step: environment is gone") as caught:
                    await good.step(ACTION)
                assert caught.value.retry
            else:
                assert (await good.step(ACTION)).reward == 1.0
            await good.close()
            deadline = time.monotonic() + 600.0
            while pool.kills < kills and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            assert pool.kills == kills, deed
        last = pool.episode(task_that(do="print"), 0)
        await last.reset()
        assert (await last.step(ACTION)).reward == 1.0
        await last.close()
        assert (await pool.score(task_that(), [(ACTION,)])).values == {"length": (1.0,)}
        assert "an episode of task 'train/x' blocked it" in pool.deaths[1].reason
        await pool.close()

    asyncio.run(main())


class Together:
    """Generators that answer three tries only when the worker of this round of theirs is gone, and a fourth one, which ends it, when these three have begun."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool, self.kills = pool, 0
        self.facts = GeneratorFacts("together", 520, 100, 8)
        self.begun = [0, 0, 0]

    async def generate(self, request: Request) -> Generated:
        number = int(request.id.split("/")[1])
        if number < 3:
            self.begun[number] += 1
            if self.begun[number] <= 2:
                await until(lambda: self.pool.kills >= self.begun[number])
        else:
            await until(lambda: self.begun == [self.pool.kills + 1] * 3)
        return Generated(request.id, (97, 514), (-1.0, -1.0), (0, 0), "eos")


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not reached():
            await asyncio.sleep(0.01)


def test_who_ends_a_worker_pays_for_it_alone(entries):
    """One of four tries ends its worker whenever it steps. The others, which have a single attempt, lose time and nothing else."""

    async def main():
        pool = await WorkerPool.start(LocalProcesses(), MisbehavesConfig(), 1)
        rules = Rules(0, Sampling(1, stop_ids=(514,)), 90, attempts=1)
        player = Player(rules, pool.environment_facts(), Together(pool), pool, MergingRenderer())
        calls = [
            player.tries(task_that(do="exit" if number == 3 else "answer"), [Try(f"0/{number}", 0, number, (number,))])
            for number in range(4)
        ]
        try:
            *good, [bad] = await asyncio.gather(*calls)
        finally:
            kills = pool.kills
            await pool.close()
        assert [sample.failure for [sample] in good] == [None] * 3
        assert bad.failure is not None and bad.failure.boundary == "environment" and bad.failure.attempts == 2
        assert "ended with exit code 3" in bad.failure.message and kills == 2

    asyncio.run(main())


# ---------------------------------------------------------------- generators


def test_a_generator_is_killed_and_nobody_notices(entries):
    async def main():
        recipe = resolve("llama3/debug").recipe
        config = ScriptedConfig(token_s=0.01, deadly_id=62)
        pool = await GeneratorPool.start(LocalProcesses(), config, 2, recipe, LeastLoaded())
        await pool.update(published(5))
        requests = [Request(f"r{number}", (1, 2, number), Sampling(100, seed=number)) for number in range(16)]
        alone = await asyncio.gather(*map(pool.generate, requests))
        told, begun = list[int](), asyncio.Event()

        def tell(tokens):
            told.extend(tokens)
            begun.set()

        again = [asyncio.ensure_future(pool.generate(request, tell if request.id == "r3" else None)) for request in requests]
        await begun.wait()
        os.kill(pool.processes[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        answers = await asyncio.gather(*again)
        assert [(answer.tokens, answer.versions, answer.log_probs) for answer in answers] == [
            (answer.tokens, answer.versions, answer.log_probs) for answer in alone
        ]
        assert tuple(told) == answers[3].tokens
        update = asyncio.ensure_future(pool.update(published(6)))
        await asyncio.wait_for(update, 600.0)
        assert {index: stats.version for index, stats in (await pool.stats()).items()} == {0: 6, 1: 6}
        assert pool.kills == 1 and "SIGKILL" in pool.deaths[0].reason
        with pytest.raises(UsageError, match="ids go from 0 to 63"):
            await pool.generate(Request("wrong", (64,), Sampling(1)))
        await pool.close()

    asyncio.run(main())


def test_a_generator_that_cannot_be_built_says_why(entries):
    async def main():
        recipe = resolve("llama3/debug").recipe
        with pytest.raises(UsageError, match=r"generator-\d cannot start: it needs a GPU \[from generator acme-rl-doubles:scripted\]"):
            await GeneratorPool.start(LocalProcesses(), ScriptedConfig(fails="it needs a GPU"), 2, recipe, LeastLoaded())

    asyncio.run(main())
