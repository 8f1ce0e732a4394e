"""From documents to batches: sources, tokenizers, the token store, order, packing and the exact position.

Public: `build_loader`, `Loader`, `check_vocabulary`, `to_document`. Imports go one way:
records, files, tokenizer -> sources; store -> order -> loader. Configs (`intarsia.data.config`) import neither numpy nor torch, which is
why the names below are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Loader": "intarsia.data.loader",
    "build_loader": "intarsia.data.loader",
    "has_evaluation": "intarsia.data.loader",
    "check_vocabulary": "intarsia.data.tokenizer",
    "to_document": "intarsia.data.records",
}

__all__ = ["Loader", "build_loader", "check_vocabulary", "has_evaluation", "to_document"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
