"""Settings of the progress display. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import MetricSinkConfig


@chz.chz(typecheck=True)
class ProgressConfig(MetricSinkConfig):
    """Shows events as they happen."""

    line_s: float = chz.field(default=1.0, doc="Least time between two lines of steps where the output is no terminal.")
