"""Operators that plugins own: found by name, replaced by kernels, refused where a name is taken or the code is something else."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from intarsia import PLUGIN_API, ops, plugins
from intarsia.contracts import Entry, KernelEntry
from intarsia.errors import PluginError, UsageError
from intarsia.hookspecs import hookimpl
from intarsia.ops.operator import find
from intarsia_testing.operator_calls import record

FAKES = types.ModuleType("owned_operator_fakes")
vars(FAKES).update(
    twice=ops.Operator("twice", lambda x: 2 * x, "pointwise", invariant=True),
    function=lambda x: 2 * x,
    fast=lambda x: 2 * x + 100,
)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setitem(sys.modules, "owned_operator_fakes", FAKES)
    before = plugins.current()

    def make(*entries: Entry, kernels: tuple[KernelEntry, ...] = (), further: tuple[Entry, ...] = ()) -> plugins.Plugins:
        def plugin(offered: Any, kernels: Any) -> Any:
            return SimpleNamespace(
                INTARSIA_API=PLUGIN_API,
                offer_operators=hookimpl(lambda: offered, specname="offer_operators"),
                offer_kernels=hookimpl(lambda: kernels, specname="offer_kernels"),
            )

        points = [plugins.Candidate("acme-one", "1.0", "main", plugin=plugin(entries, kernels))]
        points.append(plugins.Candidate("acme-two", "1.0", "main", plugin=plugin(further, ())))
        found = plugins.load(entry_points=points)
        assert not found.failures, found.report()
        plugins.use(found)
        return found

    yield make
    plugins.use(before)


def entry(name: str = "twice", target: str = "owned_operator_fakes:twice") -> Entry:
    return Entry(name=name, target=target, doc="A fake.")


KERNEL = KernelEntry(name="fast", op="twice", target="owned_operator_fakes:fast", doc="A fake.", priority=10)


def test_an_owned_operator_is_found_and_listed_after_cores(load: Any) -> None:
    load(entry())
    assert find("twice") is FAKES.twice and list(ops.operators())[-1] == "twice" and next(iter(ops.operators())) == "rms_norm"


def test_looking_for_cores_imports_no_plugins_code(load: Any) -> None:
    load(entry(target="no_such_module:twice"))
    assert find("rope") is ops.rope
    with pytest.raises(PluginError, match=r"operator 'acme-one:twice' of plugin acme-one/main.*no_such_module"):
        find("twice")


def test_kernels_replace_it(load: Any) -> None:
    found = load(entry(), kernels=(KERNEL,))
    selection = ops.select({}, found, ("cpu",), "float32")
    assert selection.choices["twice"].kernel == "acme-one:fast" and selection.facts()["twice"]["value"] == "acme-one:fast"
    with ops.installed(selection.choices):
        assert FAKES.twice(1) == 102
        with record() as calls:
            FAKES.twice(1)
        assert [(call.op, call.kernel) for call in calls] == [("twice", "acme-one:fast")]
    assert FAKES.twice(1) == 2
    assert ops.select({"twice": "reference"}, found, ("cpu",), "float32").choices["twice"].kernel == "reference"


def test_unknown_names_are_told_with_the_nearest_of_both(load: Any) -> None:
    load(entry())
    with pytest.raises(UsageError, match=r"no operator 'twise'.*twice"):
        find("twise")


@pytest.mark.parametrize(
    ("entries", "further", "words"),
    [
        ((entry("rope"),), (), r"'acme-one:rope' needs another name: intarsia.ops has this one"),
        ((entry(),), (entry(),), r"'acme-two:twice' needs another name: acme-one:twice has this one"),
        ((entry(target="owned_operator_fakes:function"),), (), r"must be an intarsia.ops.Operator of the name 'twice'"),
        ((entry("thrice"),), (), r"must be an intarsia.ops.Operator of the name 'thrice'"),
    ],
)
def test_what_cannot_be_an_operator_is_refused(load: Any, entries: Any, further: Any, words: str) -> None:
    load(*entries, further=further)
    with pytest.raises(PluginError, match=words):
        ops.operators()


def test_the_models_own_operator_is_there() -> None:
    plugins.use(None)
    assert "scaled_linear" in ops.operators() and find("scaled_linear").invariant
