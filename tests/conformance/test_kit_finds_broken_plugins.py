"""The kit says which promise is broken, for storages, environments and data sources that break one each."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from intarsia.contracts import Document, Limits, Observation, StepResult, Task, ToolSpec, Turn
from intarsia_testing import Conformance, DataSourceConformance, EnvironmentConformance, StorageConformance
from intarsia_testing.doubles import MemoryStorage, MemoryWriter
from intarsia_testing.environment_double import FewTurns, GuessEnvironment, GuessEpisode

pytest_plugins = ["pytester"]


def says(kit: Any, test: str, promise: str, tmp_path: Path, words: str = "") -> None:
    """The test fails, and says that `promise` is broken."""
    method = getattr(kit, test)
    needed = inspect.signature(method).parameters
    available = {"tmp_path": tmp_path, "storage": kit.make(tmp_path / "root") if "storage" in needed else None}
    with pytest.raises(pytest.fail.Exception, match=rf"promise `{promise}` is broken: .*{words}"):
        method(**{name: available[name] for name in needed})


# ---------------------------------------------------------------- storages


class EagerWriter(MemoryWriter):
    def write(self, data: bytes | memoryview) -> None:
        super().write(data)
        self.close()


class NoAbort(MemoryWriter):
    def abort(self) -> None:
        self.close()


class Appending(MemoryWriter):
    def close(self) -> None:
        self._data[:0] = self._storage.files.get(self._name, b"")
        super().close()


class Halving(MemoryWriter):
    def write(self, data: bytes | memoryview) -> None:
        super().write(memoryview(data).cast("B")[: len(data)])


class Eager(MemoryStorage):
    writer: type[MemoryWriter] = EagerWriter

    def open(self, name: str) -> MemoryWriter:
        return self.writer(self, self._check(name))


class NoAbortStorage(Eager):
    writer = NoAbort


class AppendingStorage(Eager):
    writer = Appending


class HalvingStorage(Eager):
    writer = Halving


class WholeReads(MemoryStorage):
    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return super().read(name)


class KeyErrors(MemoryStorage):
    def size(self, name: str) -> int:
        return len(self.files[name])


class Unsorted(MemoryStorage):
    def list(self, prefix: str = "") -> list[str]:
        return sorted(super().list(prefix), reverse=True)


class PrefixList(MemoryStorage):
    def list(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self.files if name.startswith(prefix))


class CopyingPublish(MemoryStorage):
    def publish(self, source: str, destination: str) -> None:
        before = dict(self.files)
        super().publish(source, destination)
        self.files.update(before)


class Replacing(MemoryStorage):
    def publish(self, source: str, destination: str) -> None:
        self.remove(destination)
        super().publish(source, destination)


class StrictRemove(MemoryStorage):
    def remove(self, prefix: str) -> None:
        if not self.list(prefix) and prefix not in self.files:
            raise FileNotFoundError(prefix)
        super().remove(prefix)


class Escaping(MemoryStorage):
    def _check(self, name: str) -> str:
        return name


@pytest.mark.parametrize(
    ("storage", "test", "promise"),
    [
        (Eager, "test_a_file_appears_when_closed", "a file appears when it is closed"),
        (NoAbortStorage, "test_abort_leaves_nothing", "abort leaves nothing"),
        (AppendingStorage, "test_open_replaces", "open replaces"),
        (HalvingStorage, "test_wide_elements_count_as_bytes", "bytes come back"),
        (WholeReads, "test_ranges", "reads ranges"),
        (KeyErrors, "test_missing_files", "a missing name is FileNotFoundError"),
        (Unsorted, "test_list", "lists"),
        (PrefixList, "test_list", "lists"),
        (CopyingPublish, "test_publish_moves_the_folder", "publish moves the folder"),
        (Replacing, "test_publish_never_replaces", "publish never replaces"),
        (Replacing, "test_publish_is_one_winner", "publish is atomic"),
        (StrictRemove, "test_remove", "remove ignores what is missing"),
        (Escaping, "test_no_escape", "names stay inside"),
    ],
)
def test_broken_storages(storage: type[MemoryStorage], test: str, promise: str, tmp_path: Path) -> None:
    class Kit(StorageConformance):
        one = storage()

        def make(self, root: Path) -> Any:
            return self.one

    says(Kit(), test, promise, tmp_path)


# ---------------------------------------------------------------- environments


def environment_with(**methods: Callable[..., Any]) -> Callable[[], GuessEnvironment]:
    """GuessEnvironment with other methods; `reset`, `step` and `close` replace those of its episodes."""
    of_episode = {name: methods.pop(name) for name in ("reset", "step", "close") if name in methods}
    episode_class = type("Episode", (GuessEpisode,), of_episode)

    def episode(self: GuessEnvironment, task: Task, seed: int) -> Any:
        made = GuessEnvironment.episode(self, task, seed)
        return episode_class(made.task, made.secret, made.limits, made.fail_at)

    return type("Broken", (GuessEnvironment,), {"episode": episode, **methods})


def observing(observation: Observation) -> Callable[[], GuessEnvironment]:
    async def reset(self: GuessEpisode) -> Observation:
        return observation

    return environment_with(reset=reset)


def answering(change: Callable[[GuessEpisode, StepResult], Any]) -> Callable[[], GuessEnvironment]:
    async def step(self: GuessEpisode, action: Turn) -> Any:
        return change(self, await GuessEpisode.step(self, action))

    return environment_with(step=step)


async def endless(self: GuessEpisode, action: Turn) -> StepResult:
    return StepResult(Observation((Turn("user", "Go on."),)), reward=0.0)


async def generous(self: GuessEpisode, action: Turn) -> StepResult:
    return StepResult(None, reward=1.0, ended=True)


async def fragile(self: GuessEpisode, action: Turn) -> StepResult:
    if action.tool_calls:
        __import__("json").loads(action.tool_calls[0].arguments)
    return await GuessEpisode.step(self, action)


async def close_once(self: GuessEpisode) -> None:
    self.closed += 1
    if self.closed > 1:
        raise ValueError("closed already")


shared: list[int] = []


async def sharing(self: GuessEpisode, action: Turn) -> StepResult:
    shared.append(1)
    text = f"{len(shared)} turns were taken."
    self.turns += 1
    return StepResult(Observation((Turn("user", text),)), reward=0.0, ended=self.turns > 2)


class Short(FewTurns):
    async def score(self, task: Task, episodes: Sequence[Sequence[Turn]]) -> list[float]:
        return [1.0]


class Infinite(FewTurns):
    async def score(self, task: Task, episodes: Sequence[Sequence[Turn]]) -> list[float]:
        return [float("nan")] * len(episodes)


def tasks_of(*tasks: Task) -> Callable[..., Any]:
    return environment_with(tasks=lambda self, split: list(tasks))


BAD_TOOL = ToolSpec("t", "A tool.", {"type": "object", "properties": {}, "required": ["x"]})
HELLO = Turn("user", "Hello.")


@pytest.mark.parametrize(
    ("environment", "test", "promise"),
    [
        (lambda: SimpleNamespace(limits=Limits()), "test_it_is_an_environment", "is an environment"),
        (lambda: GuessEnvironment(turns=0), "test_it_is_an_environment", "limits"),
        (tasks_of(Task("a", {}), Task("a", {})), "test_tasks_are_stable", "task ids are unique"),
        (tasks_of(Task("a", {"x": {1, 2}})), "test_tasks_are_stable", "task data is JSON"),
        (tasks_of(Task("a", {"x": (1, 2)})), "test_tasks_are_stable", "task data is JSON"),
        (environment_with(tasks=lambda self, split: [Task(str(random.random()), {})]), "test_tasks_are_stable", "tasks are stable"),
        (tasks_of(Task("a", {})), "test_unknown_split_is_a_usage_error", "unknown splits"),
        (environment_with(tasks=lambda self, split: self._tasks[split]), "test_unknown_split_is_a_usage_error", "unknown splits"),
        (observing(Observation(())), "test_observations_are_well_formed", "observations"),
        (observing(Observation((Turn("robot", "Hello."),))), "test_observations_are_well_formed", "roles"),  # type: ignore[arg-type]
        (observing(Observation((Turn("user", "Hello.", tokens=(1,)),))), "test_observations_are_well_formed", "environments never tokenise"),
        (observing(Observation((Turn("tool", "Hello."),))), "test_observations_are_well_formed", "tool answers"),
        (observing(Observation((HELLO,), (BAD_TOOL,))), "test_observations_are_well_formed", "tool schemas"),
        (observing(Observation((HELLO,), (ToolSpec("t", "A tool.", {"x": 1}),))), "test_observations_are_well_formed", "tool schemas"),
        (answering(lambda e, r: StepResult(r.observation, reward=float("nan"), ended=r.ended, truncated=r.truncated)), "test_observations_are_well_formed", "rewards are finite"),
        (answering(lambda e, r: StepResult(None)), "test_observations_are_well_formed", "results"),
        (answering(lambda e, r: None), "test_observations_are_well_formed", "results"),
        (answering(lambda e, r: StepResult(Observation((Turn("user", str(random.random())),)), 0.0, r.ended, r.truncated)), "test_equal_actions_give_equal_observations", "deterministic"),
        (environment_with(step=sharing), "test_episodes_share_no_state", "episodes share no state"),
        (environment_with(step=generous), "test_an_ended_episode_earns_nothing", "the end is the end"),
        (environment_with(step=endless), "test_limits_are_respected", "limits are respected"),
        (environment_with(step=fragile), "test_mistakes_of_the_policy_are_answers", "a policy's mistakes are answers"),
        (environment_with(close=close_once), "test_close_may_come_at_any_time", "close"),
        (environment_with(rubrics=lambda self: (Short(),)), "test_rubrics_score_every_episode", "one score for each episode"),
        (environment_with(rubrics=lambda self: (Infinite(),)), "test_rubrics_score_every_episode", "scores are finite"),
        (environment_with(rubrics=lambda self: (FewTurns(), FewTurns())), "test_rubrics_score_every_episode", "rubrics"),
        (answering(lambda e, r: random.random() and r), "test_random_generators_are_left_alone", "random generators are left alone"),
    ],
)  # fmt: skip
def test_broken_environments(environment: Callable[[], Any], test: str, promise: str, tmp_path: Path) -> None:
    class Kit(EnvironmentConformance):
        max_tasks = 1

        def environment(self) -> Any:
            return environment()

    says(Kit(), test, promise, tmp_path)


def test_an_environment_without_any_score_is_found(tmp_path: Path) -> None:
    async def silent(self: GuessEpisode, action: Turn) -> StepResult:
        return StepResult(None, ended=True)

    class Kit(EnvironmentConformance):
        def environment(self) -> Any:
            return environment_with(step=silent, rubrics=lambda self: ())()

    says(Kit(), "test_every_episode_is_scored", "every episode is scored", tmp_path)


@pytest.mark.parametrize(
    ("error", "promise"), [(None, "a failure is never a reward"), (OSError("the sandbox is gone"), "failures are typed")]
)
def test_an_untyped_failure_is_found(error: Exception | None, promise: str, tmp_path: Path) -> None:
    async def step(self: GuessEpisode, action: Turn) -> StepResult:
        if error is not None:
            raise error
        return StepResult(None, reward=0.0, ended=True)

    class Kit(EnvironmentConformance):
        def failure(self) -> Any:
            made = environment_with(step=step)()
            return made, made.tasks("train")[0], Turn("assistant", "x")

    says(Kit(), "test_failures_are_typed_and_no_reward", promise, tmp_path)


# ---------------------------------------------------------------- data sources


class Source:
    """A right one, by default."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Document:
        self.reads += 1
        return Document(text=self.texts[index])

    def fingerprint(self) -> str:
        return repr(self.texts)


def source_with(**methods: Callable[..., Any]) -> Callable[[Sequence[str]], Any]:
    return type("Broken", (Source,), methods)


def drawing(self: Source, index: int) -> Document:
    random.random()
    return Document(text=self.texts[index])


@pytest.mark.parametrize(
    ("source", "test", "promise"),
    [
        (lambda texts: list(texts), "test_it_is_a_data_source", "is a data source"),
        (source_with(__len__=lambda self: 1), "test_it_is_a_data_source", "is a data source"),
        (source_with(__getitem__=lambda self, index: "text"), "test_documents_are_well_formed", "documents are well formed"),
        (source_with(__getitem__=lambda self, index: Document()), "test_documents_are_well_formed", "documents are well formed"),
        (source_with(__getitem__=lambda self, index: Document(text=str(id(self)))), "test_length_and_documents_stay", "document i is the same whenever asked"),
        (source_with(fingerprint=lambda self: f"{self.texts} {self.reads}"), "test_fingerprint_follows_the_documents", "the fingerprint stays"),
        (source_with(fingerprint=lambda self: "1"), "test_fingerprint_follows_the_documents", "the fingerprint follows the documents"),
        (source_with(fingerprint=lambda self: 1), "test_fingerprint_follows_the_documents", "the fingerprint is text"),
        (source_with(), "test_mistakes_are_usage_errors", "mistakes are usage errors"),
        (source_with(__getitem__=drawing), "test_random_generators_are_left_alone", "random generators are left alone"),
    ],
)  # fmt: skip
def test_broken_sources(source: Callable[..., Any], test: str, promise: str, tmp_path: Path) -> None:
    class Kit(DataSourceConformance):
        def config(self, folder: Path) -> Any:
            return ("a", "b", "c")

        def changed(self, folder: Path) -> Any:
            return ("a", "b", "d")

        def broken(self, folder: Path) -> Any:
            return ("a", 1)

        def _build(self, config: Any) -> Any:
            return source(config)

    says(Kit(), test, promise, tmp_path)


# ---------------------------------------------------------------- what every kind shares


@pytest.mark.parametrize(("entry", "promise"), [("", "named"), ("posxi", "offered")])
def test_an_entry_that_is_not_there_is_found(entry: str, promise: str, tmp_path: Path) -> None:
    class Kit(StorageConformance):
        pass

    Kit.entry = entry
    with pytest.raises(pytest.fail.Exception, match=f"promise `{promise}` is broken"):
        Kit().found_entry()


def test_settings_of_another_entry_and_a_heavy_module_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from intarsia_data.config import StdlibConfig

    class Kit(StorageConformance):
        entry = "posix"
        config = StdlibConfig()

    with pytest.raises(pytest.fail.Exception, match="promise `settings are its own` is broken: StdlibConfig is the settings of"):
        Kit().given_configs()
    monkeypatch.setattr(Conformance, "light_references", lambda self, entry: ["intarsia.comm:Communicator"])
    says(Kit(), "test_entry_modules_import_no_torch", "light", tmp_path, "importing intarsia.comm imports torch")


def test_the_report_says_what_is_kept_broken_and_left_to_write(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from intarsia_testing import StorageConformance
        from intarsia_testing.doubles import MemoryStorage, MemoryWriter

        class Forgetful(MemoryStorage):
            def remove(self, prefix):
                raise NotImplementedError("write `remove`: delete it.")
            def describe(self):
                return ""

        class TestForgetful(StorageConformance):
            def make(self, root):
                return Forgetful()
        """
    )
    result = pytester.runpytest_subprocess("-q", "-k", "says_where or test_remove or no_escape or wide", "--tb=no")
    result.stdout.fnmatch_lines(
        [
            "*intarsia conformance*",
            "storage TestForgetful keeps 1 of 4 promises:",
            "  broken   says where it is: promise `says where it is` is broken: describe() gives ''*",
            "  to write `remove`: delete it. (2 promises)",
        ]
    )


def test_the_pytest_plugin_is_silent_and_light_without_conformance_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_light():\n    assert not {'torch', 'intarsia', 'hypothesis.strategies'} & set(sys.modules)\n")
    options = ("-q", "--strict-markers", "-p", "no:hypothesispytest", "-W", "error")
    result = pytester.runpytest_subprocess(*options)
    result.assert_outcomes(passed=1)
    assert "intarsia" not in result.stdout.str()
