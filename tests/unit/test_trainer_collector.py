"""Ranks wait for one another, so that none of them may stop to look through all objects in the middle of a run."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from intarsia.train.trainer import Trainer


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_objects_of_the_start_are_left_out_once_on_many_ranks(ranks: int, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = object.__new__(Trainer)
    trainer._built = SimpleNamespace(world=SimpleNamespace(size=ranks), evaluation=None)
    trainer._error, trainer._has_frozen = None, False
    collected: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(None))
    gc.unfreeze()
    try:
        if before:  # as Python 3.12 starts, or as an application has it
            gc.freeze()
        found = gc.get_freeze_count()
        kept = {"made": ["after the start"]}
        for _ in range(2):
            trainer._spare_collector()
        frozen = ranks > 1
        assert (gc.get_freeze_count() > found) is frozen, kept
        assert len(collected) == frozen
        trainer._close_parts()
        assert gc.get_freeze_count() == (0 if frozen else found)
    finally:
        gc.unfreeze()
