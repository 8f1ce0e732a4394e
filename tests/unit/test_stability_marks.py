"""Every symbol of core's public doors says how stable it is, itself or in its module's docstring."""

from __future__ import annotations

import importlib
import inspect
import re
import sys

import pytest

DOORS = (
    "errors", "contracts", "hookspecs", "plugins", "config", "layout", "comm", "mesh", "device", "parameters", "ops", "checkpoint", "cli",
)  # fmt: skip
"""What plugins import from. Everything else in core is private."""


def public(door: str) -> dict[str, object]:
    module = importlib.import_module(f"intarsia.{door}")
    listed = getattr(module, "__all__", None)
    names = listed or [name for name, value in vars(module).items() if getattr(value, "__module__", "").startswith(module.__name__)]
    found = {name: getattr(module, name) for name in names if not name.startswith("_")}
    return {name: value for name, value in found.items() if inspect.isclass(value) or inspect.isfunction(value)}


@pytest.mark.parametrize("door", DOORS)
def test_public_symbols_say_how_stable_they_are(door: str) -> None:
    unmarked = []
    for name, value in public(door).items():
        home = sys.modules[value.__module__]  # type: ignore[attr-defined]
        texts = (inspect.getdoc(value) or "", home.__doc__ or "")
        if not any(re.search(r"Stability: (stable|provisional|private)", text) for text in texts):
            unmarked.append(f"{value.__module__}.{name}")  # type: ignore[attr-defined]
    assert sorted(set(unmarked)) == []
