"""The errors that users and plugin authors meet, each with the process's exit code.

A message says what is wrong, where, why, and what to do. `IntarsiaError`s are shown without a traceback;
anything else that reaches the command line is a bug of ours and is shown with one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class IntarsiaError(Exception):
    """Base of every error that is meant for the user. Stability: stable."""

    exit_code = 1


class UsageError(IntarsiaError):
    """The request is wrong: a recipe, an override, a file, a combination. Stability: stable."""

    exit_code = 2


class PluginError(IntarsiaError):
    """A plugin is missing, broken, incompatible or broke its contract. Stability: stable."""

    exit_code = 3


class NumericsError(IntarsiaError):
    """A number that must be finite or equal is not. Stability: stable."""

    exit_code = 4


class CheckpointError(IntarsiaError):
    """A checkpoint cannot be written, read or trusted. Stability: stable."""

    exit_code = 5


class DistributedError(IntarsiaError):
    """Processes of one run disagree, or one of them is missing or has failed. Stability: stable."""

    exit_code = 6


class StoppedWithCheckpoint(IntarsiaError):
    """The run was asked to stop (SIGTERM, SIGINT), saved a checkpoint and ended. Stability: stable."""

    exit_code = 75


def nearest(name: str, known: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """The known names closest to `name`, best first; empty when none is close.

    Compares without case and also against the part after the last `:` or `.`, so that `Owend` finds
    `intarsia-placements:owned`. Stability: stable.
    """
    known = list(dict.fromkeys(known))
    folded: dict[str, str] = {}
    for candidate in known:
        for form in (candidate, candidate.rpartition(":")[2], candidate.rpartition(".")[2]):
            folded.setdefault(form.lower(), candidate)
    forms = [name.lower(), name.lower().rpartition(":")[2], name.lower().rpartition(".")[2]]
    hits: list[str] = []
    for form in dict.fromkeys(forms):
        hits += [folded[hit] for hit in difflib.get_close_matches(form, list(folded), n=count, cutoff=0.6)]
    return tuple(dict.fromkeys(hits))[:count]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence for the end of an error message: the nearest names, else all of them (at most 12). Stability: stable."""
    known = sorted(set(known))
    close = nearest(name, known)
    if close:
        return f"Did you mean {' or '.join(repr(hit) for hit in close)}?"
    if not known:
        return "None is known."
    shown = ", ".join(known[:12])
    return f"Known: {shown}{', ...' if len(known) > 12 else ''}."
