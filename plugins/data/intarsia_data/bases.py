"""The base of processors' settings, which loaders of several distributions name. Their kind is declared by intarsia-multimodal. Torch-free. Stability: provisional."""

from __future__ import annotations

import chz
from intarsia.config.bases import Config


@chz.chz(typecheck=True)
class ProcessorConfig(Config):
    """Settings of a processor."""
