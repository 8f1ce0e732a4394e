"""Ranks wait for one another, so that none of them may stop to look through all objects in the middle of a run."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from intarsia.train.trainer import Trainer


@pytest.mark.parametrize(("ranks", "frozen"), [(2, True), (1, False)])
def test_objects_of_the_start_are_left_out_once_on_many_ranks(ranks: int, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: Any = object.__new__(Trainer)
    trainer._built = SimpleNamespace(world=SimpleNamespace(size=ranks), evaluation=None)
    trainer._error = None
    collected: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(None))
    try:
        for _ in range(2):
            trainer._spare_collector()
        assert (gc.get_freeze_count() > 0) is frozen
        assert len(collected) == frozen
        trainer._close_parts()
        assert not gc.get_freeze_count()
    finally:
        gc.unfreeze()
