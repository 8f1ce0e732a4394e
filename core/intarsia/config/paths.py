"""Paths of values in a recipe: `data.mixture.0.weight`, `kernels."odd key"`, and the globs that choose many.

A segment is a field's name, an index or a mapping's key; a key that is not made of letters, digits and `_ * : / + @ -` is written as a JSON
string. In a glob `*` and `?` match within one segment, `{0,3}` one of several, `0-31` an index in a range, and `...` (or `**`) any number of segments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

SPREAD = "**"
_PLAIN = re.compile(r"[\w*:/+@-]+")
_SEGMENT = r'(?:"(?:[^"\\]|\\.)*"|(?:\{[^{}]*\}|[^."{}])+)'
_PATH = re.compile(rf"\.{{3,}}|(?:\.{{3,}})?{_SEGMENT}(?:(?:\.{{3,}}|\.){_SEGMENT})*(?:\.{{3,}})?")
_TOKEN = re.compile(rf"{_SEGMENT}|\.{{3,}}")
_RANGE = re.compile(r"(\d+)-(\d+)")
_WILD = {"*": ".*", "?": "."}
# What one segment of a glob accepts: itself, a pattern, or (None) any number of segments.
Matcher = str | re.Pattern[str] | None


def join(parent: str, segment: str) -> str:
    """The path of `segment` beneath `parent` (empty: the recipe itself)."""
    written = segment if _PLAIN.fullmatch(segment) and segment != SPREAD else json.dumps(segment)
    return f"{parent}.{written}" if parent else written


def split(path: str) -> list[str]:
    """The segments of a path or glob as written, `...` as `**`. Raises ValueError where it is malformed."""
    if not _PATH.fullmatch(path):
        raise ValueError(f'`{path}` is no path: write names with one `.` between them, odd keys as "key"')
    return [SPREAD if token.startswith("...") else token for token in _TOKEN.findall(path)]


def unquote(segment: str) -> str:
    """A segment as written, taken literally."""
    return json.loads(segment) if segment.startswith('"') else segment


def matcher(segment: str) -> Matcher:
    """What a glob's segment accepts."""
    if segment == SPREAD:
        return None
    if span := _RANGE.fullmatch(segment):
        first, last = int(span[1]), min(int(span[2]), int(span[1]) + 9999)
        return re.compile("|".join(map(str, range(first, last + 1))) or "(?!)")
    if segment.startswith('"') or not set("*?{") & set(segment):
        return unquote(segment)
    pieces = [(piece, piece[1:-1].split(",")) for piece in re.findall(r"\{[^{}]*\}|.", segment)]
    return re.compile(
        "".join(
            "(?:" + "|".join(map(re.escape, any_of)) + ")" if piece[0] == "{" else _WILD.get(piece, re.escape(piece))
            for piece, any_of in pieces
        )
    )


def matches(pattern: Sequence[Matcher], segments: Sequence[str]) -> bool:
    """Whether the glob chooses the path with these (unquoted) segments."""
    for index, accepted in enumerate(pattern):
        if accepted is None:
            return any(matches(pattern[index + 1 :], segments[start:]) for start in range(index, len(segments) + 1))
        if index >= len(segments) or not (
            accepted == segments[index] if isinstance(accepted, str) else accepted.fullmatch(segments[index])
        ):
            return False
    return len(pattern) == len(segments)


def folded(path: str) -> str:
    """The path with indices replaced by `*`: what is the same in equal layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
