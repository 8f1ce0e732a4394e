"""Text from a trained model: caches, sampling, the generate command.

    from intarsia_generation import SamplingConfig, load

    generator = load("runs/my-run")
    (completion,) = generator.generate(["def "], SamplingConfig(max_tokens=64, temperature=0.8, top_p=0.95))

Importing this imports no torch; `load` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from intarsia_generation.settings import SamplingConfig

if TYPE_CHECKING:
    from intarsia_generation.cache import CacheContext
    from intarsia_generation.generator import Completion, Generator
    from intarsia_generation.prompts import Prompt
    from intarsia_generation.source import load

__version__ = "0.1.0.dev0"
__all__ = ["CacheContext", "Completion", "Generator", "Prompt", "SamplingConfig", "load"]

_HOMES = {"CacheContext": "cache", "Completion": "generator", "Generator": "generator", "Prompt": "prompts", "load": "source"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
