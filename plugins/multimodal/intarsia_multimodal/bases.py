"""The base of processors' settings. Torch-free. Stability: provisional."""

from __future__ import annotations

import chz
from intarsia.config.bases import Config


@chz.chz(typecheck=True)
class ProcessorConfig(Config):
    """Settings of a processor."""
