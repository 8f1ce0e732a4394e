"""Exceptions that cross from one process to another: those of ours with their class, all others with their words."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from intarsia import errors
from intarsia.contracts.environment import EnvironmentFailure

CLASSES: dict[str, type[errors.IntarsiaError]] = {
    each.__name__: each
    for each in (
        errors.IntarsiaError,
        errors.UsageError,
        errors.PluginError,
        errors.NumericsError,
        errors.CheckpointError,
        errors.DistributedError,
        errors.StoppedWithCheckpoint,
    )
}

MOST_TEXT = 20_000
"""Characters of a message that travel."""


class RemoteError(Exception):
    """An exception of no class of ours, raised in another process. `kind` is its class's name; `trace` is its traceback there. Stability: provisional."""

    def __init__(self, message: str, kind: str = "Exception", trace: str = "") -> None:
        super().__init__(message)
        self.kind, self.trace = kind, trace


def plain_error(error: BaseException) -> dict[str, Any]:
    """An exception as plain values."""
    trace = "".join(traceback.format_tb(error.__traceback__))[-MOST_TEXT:]
    if isinstance(error, EnvironmentFailure):
        text = str(error).removeprefix(f"{error.boundary}: ")
        return {"class": "EnvironmentFailure", "text": cut(text), "boundary": error.boundary, "retry": error.retry, "trace": trace}
    if isinstance(error, RemoteError):
        return {"class": error.kind, "text": cut(str(error)), "trace": error.trace}
    known = next((parent.__name__ for parent in type(error).__mro__ if CLASSES.get(parent.__name__) is parent), None)
    return {"class": known or type(error).__name__, "text": cut(say(error)) if known else words(error), "trace": trace}


def error_of(plain: Mapping[str, Any]) -> Exception:
    """The exception of `plain_error`."""
    if plain["class"] == "EnvironmentFailure":
        return EnvironmentFailure(plain["boundary"], plain["text"], retry=plain["retry"])
    if plain["class"] in CLASSES:
        return CLASSES[plain["class"]](plain["text"])
    error = RemoteError(plain["text"], plain["class"], plain["trace"])
    error.add_note(f"There:\n{error.trace}")
    return error


def words(error: BaseException) -> str:
    """An exception in one line: its class, its message and where it was raised."""
    message = say(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' if message else ''}{cut(message)}{where}"


def say(error: BaseException) -> str:
    """`str(error)`, whatever its class does."""
    try:
        return str(error)
    except Exception as second:
        return f"(its message cannot be shown: {type(second).__name__})"


def cut(text: str, most: int = MOST_TEXT) -> str:
    """The text, or its beginning and how much was left out."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} characters more)"
