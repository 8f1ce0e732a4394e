"""Settings of the TensorBoard sink. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import MetricSinkConfig


@chz.chz(typecheck=True)
class TensorBoardConfig(MetricSinkConfig):
    """Writes a run's numbers as TensorBoard scalars."""

    directory: str = chz.field(default="metrics/tensorboard", doc="Folder of the event files, in the run directory unless absolute.")
    flush_s: int = chz.field(default=30, doc="Seconds after which what was written is on disk at the latest.")
