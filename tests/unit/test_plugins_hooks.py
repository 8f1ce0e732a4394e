"""Calling hooks: who may stop a run, who is switched off, on which ranks, with which randomness, and what the trace says."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import random
import types

import pytest
from intarsia import PLUGIN_API, plugins
from intarsia.errors import CheckpointError, PluginError, UsageError
from intarsia.hookspecs import hookimpl


@dataclasses.dataclass
class FakeRun:
    """A double of Run."""

    rank: int = 0
    log: list = dataclasses.field(default_factory=list)


def load(**functions) -> plugins.Plugins:
    """One distribution for each keyword: a function or a dict of functions by hook."""
    points = []
    for name, given in functions.items():
        hooks = given if isinstance(given, dict) else {given.__name__: given}
        plugin = types.SimpleNamespace(INTARSIA_API=PLUGIN_API, name=name, **{hook: hookimpl(function) for hook, function in hooks.items()})
        points.append(plugins.Candidate(f"acme-{name}", "1.0", "main", plugin=plugin))
    loaded = plugins.load(entry_points=points)
    assert not loaded.failures, loaded.report()
    return loaded


def recorder(hook: str, word: str):
    return {hook: lambda run: run.log.append(word)}


def raiser(hook: str, error: BaseException):
    def raising():
        raise error

    return {hook: raising}


def test_what_is_no_event_is_no_method():
    loaded = plugins.load(entry_points=[])
    for name in ("before_stepp", "offer_models", "add_hookspecs"):
        with pytest.raises(AttributeError, match=name):
            getattr(loaded.hooks, name)
    with pytest.raises(PluginError, match=r"takes \(run, step\) and was called with \(run\)"):
        loaded.hooks.before_step(FakeRun())


def test_every_facade_method_reaches_its_hook():
    loaded = plugins.load(entry_points=[])
    values = {
        "run": FakeRun(),
        "stage": "mesh",
        "step": 1,
        "summary": "s",
        "error": ValueError(),
        "metrics": {},
        "location": "l",
        "outcome": "done",
    }
    for spec in loaded.hooks.events():
        run = values["run"] = FakeRun()
        mine = load(a=recorder(spec.name, spec.name))
        getattr(mine.hooks, spec.name)(**{name: values[name] for name in spec.arguments})
        getattr(mine.hooks, spec.name)(*[values[name] for name in spec.arguments])
        assert run.log == [spec.name] * 2


def test_a_participant_that_raises_ends_the_call_and_is_named():
    loaded = load(a=recorder("before_step", "a"), b=raiser("before_step", ZeroDivisionError("boom")), c=recorder("before_step", "c"))
    run = FakeRun()
    with pytest.raises(PluginError, match=r"plugin acme-b/main failed in before_step: ZeroDivisionError: boom \(.*:\d+\)") as raised:
        loaded.hooks.before_step(run, 0)  # type: ignore[arg-type]
    assert run.log == ["a"]
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert "plugins.disable=acme-b/main" in str(raised.value)


def test_an_intarsia_error_keeps_its_class_and_gains_the_owner():
    error = CheckpointError("disk is full")
    loaded = load(a=raiser("before_checkpoint", error))
    with pytest.raises(CheckpointError, match=r"disk is full \[raised by plugin acme-a/main in before_checkpoint\]") as raised:
        loaded.hooks.before_checkpoint(FakeRun(), 3)  # type: ignore[arg-type]
    assert raised.value is error
    assert raised.value.exit_code == 5


def test_a_plugin_cannot_end_the_process_but_the_user_can():
    for hook in ("before_run", "after_run"):
        interrupted = load(a=raiser(hook, KeyboardInterrupt()))
        arguments = {"run": FakeRun()} | ({"outcome": "done"} if hook == "after_run" else {})
        with pytest.raises(KeyboardInterrupt):
            interrupted.hooks.call(hook, **arguments)
    with pytest.raises(PluginError, match="SystemExit: 0"):
        load(a=raiser("before_run", SystemExit(0))).hooks.before_run(FakeRun())  # type: ignore[arg-type]
    observing = load(a=raiser("after_run", SystemExit(0)))
    observing.hooks.after_run(FakeRun(), "done")  # type: ignore[arg-type]
    assert observing.hooks.disabled[0].cause.startswith("SystemExit: 0")


def test_an_observer_that_raises_is_switched_off_and_reported_once(caplog):
    counts = {"bad": 0}

    def after_step():
        counts["bad"] += 1
        raise RuntimeError("no network")

    loaded = load(
        a=recorder("after_step", "a"), b={"after_step": after_step, **recorder("after_run", "end")}, c=recorder("after_step", "c")
    )
    run = FakeRun()
    for _ in range(3):
        loaded.hooks.after_step(run, "summary")  # type: ignore[arg-type]
    loaded.hooks.after_run(run, "done")  # type: ignore[arg-type]
    assert run.log == ["a", "c"] * 3 + ["end"], "its other hooks go on"
    assert counts["bad"] == 1
    assert [(d.plugin, d.hook) for d in loaded.hooks.disabled] == [("acme-b/main", "after_step")]
    records = [r for r in caplog.records if r.name == "intarsia.acme-b" and r.levelno == logging.WARNING]
    assert len(records) == 1
    assert "no longer called" in records[0].getMessage()
    assert "RuntimeError: no network" in records[0].getMessage()
    assert len(loaded.hooks.take_warnings()) == 1
    assert loaded.hooks.take_warnings() == []


@pytest.mark.parametrize(("rank", "expected"), [(0, ["zero", "all", "part"]), (1, ["all", "part"])])
def test_ranks(rank, expected):
    loaded = load(a=recorder("after_step", "zero"), b=recorder("on_step_error", "all"), c=recorder("before_step", "part"))
    run = FakeRun(rank)
    loaded.hooks.after_step(run, "s")  # type: ignore[arg-type]
    loaded.hooks.on_step_error(run, 1, ValueError())  # type: ignore[arg-type]
    loaded.hooks.before_step(run, 1)  # type: ignore[arg-type]
    assert run.log == expected


def test_offers_are_no_events_and_unknown_events_have_a_nearest():
    hooks = load(a=recorder("before_step", "a")).hooks
    with pytest.raises(PluginError, match="not an event"):
        hooks.call("offer_losses")
    with pytest.raises(PluginError, match="Did you mean 'before_step'"):
        hooks.call("before_stp", run=None)
    with pytest.raises(PluginError, match=r"takes \(run, step\)"):
        hooks.call("before_step", run=FakeRun(), stp=1)


def test_optional_arguments_are_handed_over_too():
    """pluggy hands nothing to an argument that has a default."""
    seen = []

    def after_step(run, summary=None):
        seen.append(summary)

    load(a=after_step).hooks.after_step(FakeRun(), "summary")  # type: ignore[arg-type]
    assert seen == ["summary"]


def test_a_hook_that_reseeds_changes_nothing_and_is_reported():
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")

    def before_step():
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)

    def before_update():
        torch.rand(3, generator=torch.Generator())
        random.Random(1).random()
        numpy.random.default_rng(0).random()

    def after_step():
        torch.rand(1)
        raise RuntimeError("also when it raises")

    loaded = load(a={"before_step": before_step, "before_update": before_update, "after_step": after_step})

    def draw() -> tuple:
        random.seed(7)
        numpy.random.seed(7)
        torch.manual_seed(7)
        numpy.random.standard_normal()  # leaves a cached second value, which is state as well
        return (random.random(), numpy.random.random(), torch.rand(2).tolist(), numpy.random.standard_normal())

    expected = draw()
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    numpy.random.standard_normal()
    loaded.hooks.before_step(FakeRun(), 0)  # type: ignore[arg-type]
    loaded.hooks.before_update(FakeRun(), 0)  # type: ignore[arg-type]
    loaded.hooks.after_step(FakeRun(), "s")  # type: ignore[arg-type]
    assert (random.random(), numpy.random.random(), torch.rand(2).tolist(), numpy.random.standard_normal()) == expected
    moved = [(hook, generator) for _, hook, generator in loaded.hooks.moved_generators]
    assert moved == [("before_step", "random"), ("before_step", "numpy.random"), ("before_step", "torch"), ("after_step", "torch")]
    warnings = loaded.hooks.take_warnings()
    assert "plugin acme-a/main seeded or drew from the global generator of random in before_step" in warnings[0]
    loaded.hooks.before_step(FakeRun(), 1)  # type: ignore[arg-type]
    assert loaded.hooks.take_warnings() == [], "reported once"


def test_numpys_cached_second_normal_is_state_too():
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(3)
    numpy.random.standard_normal()
    expected = numpy.random.standard_normal()
    numpy.random.seed(3)
    numpy.random.standard_normal()
    loaded = load(a={"before_step": lambda: numpy.random.standard_normal()})  # takes the cached one: nothing else moves
    loaded.hooks.before_step(FakeRun(), 0)  # type: ignore[arg-type]
    assert numpy.random.standard_normal() == expected
    assert loaded.hooks.moved_generators == [("acme-a/main", "before_step", "numpy.random")]


def test_trace_lines(tmp_path, monkeypatch, capsys):
    class Odd:
        def __repr__(self):
            raise ValueError

    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("INTARSIA_TRACE", str(path))
    monkeypatch.setenv("RANK", "2")
    loaded = load(a=raiser("after_evaluation", ValueError("x")), b={"after_evaluation": lambda run, step, metrics: None})
    run = FakeRun(0, ["y" * 1000])
    loaded.hooks.after_evaluation(run, Odd(), {"loss": 1.0})  # type: ignore[arg-type]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first, second = lines[-2:]
    assert (first["plugin"], first["owner"], first["hook"], first["rank"]) == ("acme-a/main", "acme-a", "after_evaluation", 2)
    assert first["error"].startswith("ValueError: x")
    assert second["error"] is None
    assert second["seconds"] >= 0
    assert len(second["arguments"]["run"]) < 220
    assert second["arguments"]["step"] == "<Odd, whose repr raised ValueError>"
    assert second["arguments"]["metrics"] == "{'loss': 1.0}"
    monkeypatch.setenv("INTARSIA_TRACE", "stderr")
    load(a=recorder("before_step", "a")).hooks.before_step(FakeRun(), 4)  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["hook"] == "before_step"
    monkeypatch.setenv("INTARSIA_TRACE", str(tmp_path / "no" / "such" / "folder"))
    with pytest.raises(UsageError, match="INTARSIA_TRACE="):
        plugins.load(entry_points=[])


def test_a_call_that_nobody_implements_takes_no_state_of_generators(monkeypatch):
    hooks = plugins.load(entry_points=[]).hooks
    monkeypatch.setattr("intarsia.hooks._generators", lambda: pytest.fail("a copy of every generator's state, in each step, for nobody"))
    hooks.before_step(FakeRun(), 0)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the arrow of dependencies


def test_core_imports_nothing_of_plugins():
    from pathlib import Path

    import intarsia

    root = Path(intarsia.__file__).parent
    files = sorted(root.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not [name for name in names if name.startswith("intarsia_")], f"{path}:{node.lineno} imports {names}"
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
                "import_module",
                "__import__",
                "import_reference",
            ):
                constants = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                assert not [text for text in constants if text.startswith("intarsia_")], f"{path}:{node.lineno} imports {constants}"
