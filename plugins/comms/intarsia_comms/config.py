"""Settings of the transports. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import TransportConfig


@chz.chz(typecheck=True)
class CopyEngineConfig(TransportConfig):
    """Gathers and exchanges by the copy engines, between GPUs of one host that reach each other's memory."""
