"""Images and video in documents: processors, the loader, sources, and questions on images that the program draws.

Public: `Processor`, `Prepared`, `Slot`, `MediaError`. Configs (`intarsia_multimodal.config`) import neither numpy nor torch, which is why the names below
are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0.dev0"

_HOMES = dict.fromkeys(("MediaError", "Prepared", "Processor", "Slot"), "intarsia_multimodal.contracts")

__all__ = ["MediaError", "Prepared", "Processor", "Slot"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
