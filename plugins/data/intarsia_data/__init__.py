"""From documents to batches: sources, tokenizers, the token store, order, packing and the exact position.

Public: `build_loader`, `Loader`, `to_document`. Imports go one way:
records, files, tokenizer -> sources; tokenizer -> store -> order -> steps -> loader. Configs (`intarsia_data.config`) import neither numpy nor torch, which is
why the names below are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0.dev0"

_HOMES = {
    "Loader": "intarsia_data.loader",
    "build_loader": "intarsia_data.loader",
    "has_evaluation": "intarsia_data.loader",
    "to_document": "intarsia_data.records",
}

__all__ = ["Loader", "build_loader", "has_evaluation", "to_document"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
