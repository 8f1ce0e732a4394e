"""The weight transports keep every promise; the kit says which one is broken, for one that breaks it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from intarsia_rl.contracts import WeightTransport, WeightVersion
from intarsia_rl.weights.config import CollectiveConfig, SharedMemoryConfig, SocketConfig
from intarsia_rl.weights.shared_memory import SharedMemory
from intarsia_testing import WeightTransportConformance


class TestSharedMemory(WeightTransportConformance):
    entry = "shared_memory"


class TestSocket(WeightTransportConformance):
    entry = "socket"
    config = SocketConfig(attempts=1)


class TestCollective(WeightTransportConformance):
    entry = "collective"
    config = CollectiveConfig(attempts=1, timeout_s=300.0)


class TestCollectiveInPieces(WeightTransportConformance):
    """Of a few bytes, which cut elements and begin anywhere."""

    entry = "collective"
    config = CollectiveConfig(attempts=1, timeout_s=300.0, piece_bytes=7)


class Stale(SharedMemory):
    """Takes version 1 for version 0, which is there already."""

    def publish(self, version: int, parts: Mapping[str, Any]) -> WeightVersion | None:
        return super().publish(0 if version == 1 else version, parts)


def test_the_kit_says_which_promise_is_broken(tmp_path: Path) -> None:
    class Broken(WeightTransportConformance):
        entry = "shared_memory"

        def on_rank(self, folder: Path) -> WeightTransport:
            return Stale(SharedMemoryConfig(), folder)

    Broken().test_every_rank_publishes_its_part(tmp_path)
    with pytest.raises(pytest.fail.Exception, match="promise `training goes on` is broken: matrix of version"):
        Broken().test_training_goes_on(tmp_path)
