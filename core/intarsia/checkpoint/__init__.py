"""Checkpoints: a folder with data files, one JSON manifest, and a marker written last.

Public: `CheckpointManager`, `open_weights`, `compare_facts`. May import: errors, contracts, layout, plugins, config, and comm by type.
Imports no torch until one of the torch-using names is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from intarsia.checkpoint.commit import CheckpointRef, Skipped
    from intarsia.checkpoint.facts import Difference, compare_facts
    from intarsia.checkpoint.manager import CheckpointManager
    from intarsia.checkpoint.weights import open_weights

__all__ = [
    "CheckpointManager",
    "CheckpointRef",
    "Difference",
    "Skipped",
    "compare_facts",
    "open_weights",
]

HOMES = dict(zip(__all__, ("manager", "commit", "facts", "commit", "facts", "weights"), strict=True))


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
