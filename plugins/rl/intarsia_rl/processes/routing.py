"""Which generator gets a request."""

from __future__ import annotations

from collections.abc import Mapping

from intarsia_rl.contracts import Request
from intarsia_rl.processes.config import LeastLoadedConfig


class LeastLoaded:
    """The generator with the fewest requests; of equal ones the first, so that the choice depends on the loads alone."""

    def __init__(self, config: LeastLoadedConfig | None = None) -> None:
        self.config = config

    def choose(self, request: Request, loads: Mapping[int, int]) -> int:
        """The key of the least load."""
        return min(loads, key=lambda index: (loads[index], index))
