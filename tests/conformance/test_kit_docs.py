"""The environment that the how-to shows keeps every promise, and the pages' other snippets run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from intarsia import plugins
from intarsia.contracts import Environment, Task, Turn
from intarsia_testing import EnvironmentConformance
from intarsia_testing.cli_new_plugin import KINDS

DOCS = Path(__file__).parents[2] / "docs" / "how-to"
ENVIRONMENT, CONFORMANCE = ((DOCS / name).read_text(encoding="utf-8") for name in ("write-an-environment.md", "conformance.md"))


def blocks(page: str, title: str = "") -> list[str]:
    """The Python blocks of a page that have this title; without one those that have none."""
    wanted = f' title="{title}"' if title else ""
    return re.findall(rf"^```python{re.escape(wanted)}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def names_of(page: str, title: str) -> dict[str, Any]:
    (code,) = blocks(page, title)
    names: dict[str, Any] = {}
    exec(compile(code, title, "exec"), names)
    return names


class TestSums(EnvironmentConformance):
    splits = ("train", "evaluation")

    def environment(self) -> Environment:
        config = names_of(ENVIRONMENT, "acme_sums/config.py")["SumsConfig"]()
        return names_of(ENVIRONMENT, "acme_sums/environment.py")["build"](config)

    def action(self, task: Task, history: Sequence[Turn]) -> Turn:
        shown = names_of(ENVIRONMENT, "tests/test_conformance.py")["TestSums"]
        return shown().action(task, history)


class TestSumsByMistake(TestSums):
    def action(self, task: Task, history: Sequence[Turn]) -> Turn:
        return Turn("assistant", "zero", tokens=(1,))


@pytest.fixture
def shown_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[plugins.Plugins]:
    """The page's plugin, loaded alone."""
    for name in ("environment", "config", "plugin"):
        path = tmp_path / "acme_sums" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(blocks(ENVIRONMENT, f"acme_sums/{name}.py")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    yield plugins.load(entry_points=[plugins.Candidate("acme-sums", "1.0", "sums", "acme_sums.plugin")])
    for name in [name for name in sys.modules if name.startswith("acme_sums")]:
        del sys.modules[name]


def test_the_pages_plugin_loads(shown_plugin: plugins.Plugins) -> None:
    assert not shown_plugin.failures, shown_plugin.report()
    entry = shown_plugin.registry("environment").find("acme-sums:sums")
    assert shown_plugin.build(shown_plugin.config_class(entry)()).limits.turns == 3


def test_other_snippets_run() -> None:
    for page in (ENVIRONMENT, CONFORMANCE):
        for code in blocks(page):
            exec(compile(code, "snippet", "exec"), {})


def test_every_kind_and_class_is_on_the_page() -> None:
    import intarsia_testing

    for name in (*intarsia_testing.__all__, *KINDS):
        assert f"`{name}`" in CONFORMANCE, name
