"""The how-to's files, written out as they stand there, are plugins that load and run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from intarsia import plugins

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-plugin.md"


@pytest.fixture
def pages_files(tmp_path, monkeypatch):
    """Every titled block of the page as a file on sys.path."""
    blocks = re.findall(r"^```\w+ title=\"(\S+)\"\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, text in blocks:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        if path.parent != tmp_path:
            (path.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield dict(blocks)
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


def test_the_pages_plugins_load_whole(pages_files):
    import tomllib

    project = tomllib.loads(pages_files["pyproject.toml"])["project"]
    ((name, value),) = project["entry-points"]["intarsia"].items()
    points = [
        plugins.Candidate(project["name"], project["version"], name, value),
        plugins.Candidate("acme-gadgets", "0.3", "gadgets", "acme_gadgets.plugin"),
    ]
    loaded = plugins.load(entry_points=points)
    assert not loaded.failures, loaded.report()
    entry = loaded.registry("loss").find("acme-focal:focal")
    config = loaded.config_class(entry)
    assert config().gamma == 2.0
    assert loaded.entry_of(config()) == entry
    assert loaded.kinds()[-1] == "gadget"
    loaded.hooks.call("before_gadget", run=None, size=3)


def test_the_page_names_every_environment_variable_and_action():
    text = PAGE.read_text()
    for word in (
        "INTARSIA_PLUGINS_DISABLE",
        "INTARSIA_PLUGINS_ALLOW",
        "INTARSIA_TRACE",
        "INTARSIA_DEBUG",
        "plugins list",
        "plugins show",
        "plugins doctor",
        "plugins trace",
    ):
        assert word in text


def test_the_pages_events_have_the_arguments_of_their_specs():
    from intarsia import hookspecs

    defined = re.findall(r"^def (\w+)\(([^)]*)\):", PAGE.read_text(), re.MULTILINE)
    known = [(name, arguments) for name, arguments in defined if hasattr(hookspecs, name)]
    assert len(known) >= 4
    for name, arguments in known:
        taken = [a.strip() for a in arguments.split(",") if a.strip()]
        assert set(taken) <= set(getattr(hookspecs, name).__code__.co_varnames), name
