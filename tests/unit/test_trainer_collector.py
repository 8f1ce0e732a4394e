"""Ranks wait for one another, so that none of them may stop to look through all objects in the middle of a run."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from intarsia.train.trainer import Trainer


@pytest.mark.parametrize(("ranks", "expected"), [(1, []), (2, ["collect", "freeze", "unfreeze"])])
def test_objects_of_the_start_are_left_out_once_on_many_ranks(ranks: int, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are counted, and not objects: other tests' objects come and go beside this one, frozen ones as well."""
    trainer: Any = object.__new__(Trainer)
    trainer._built = SimpleNamespace(world=SimpleNamespace(size=ranks), evaluation=None)
    trainer._error, trainer._has_frozen = None, False
    calls: list[str] = []
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    # As Python 3.12 starts, or as an application has it: what is frozen already does not tell whether the trainer did it.
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    for _ in range(2):
        trainer._spare_collector()
    trainer._close_parts()
    assert calls == expected
