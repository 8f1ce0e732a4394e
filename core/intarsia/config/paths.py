"""Paths of values in a recipe: `data.mixture.0.weight`, `kernels."odd.key"`, and the globs that choose many.

A segment is a field's name, an index or a mapping's key; a key that is not made of letters, digits and `_ * : / + @ -` is written as a JSON
string. In a glob `*` and `?` match within one segment, `{0,3}` one of several, `0-31` an index in a range, and `...` (or `**`) any number of segments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

SPREAD = "**"
_PLAIN = re.compile(r"[\w*:/+@-]+")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\{[^{}]*\}|[^."{}]+')
Matcher = str | re.Pattern[str] | None
"""What one segment of a glob accepts: itself, a pattern, or (None) any number of segments."""


def join(parent: str, segment: str) -> str:
    """The path of `segment` beneath `parent` (empty: the recipe itself)."""
    if not _PLAIN.fullmatch(segment) or segment == SPREAD:
        segment = json.dumps(segment)
    return f"{parent}.{segment}" if parent else segment


def split(path: str) -> list[str]:
    """The segments of a path or glob as written, `...` as `**`. Raises ValueError where it is malformed."""
    if '"' not in path and "{" not in path:
        tokens = re.sub(r"\.{3,}", f".{SPREAD}.", path).removeprefix(".").removesuffix(".") if "..." in path else path
        segments = tokens.split(".")
        if not all(segments):
            raise ValueError(f"`{path}` has an empty part")
        return segments
    segments, position = [], 0
    while position < len(path):
        if path.startswith("...", position):
            segments.append(SPREAD)
            position += 3
            continue
        token = ""
        while match := _TOKEN.match(path, position):
            token, position = token + match.group(), match.end()
            if match.group().startswith('"'):
                break
        separated = position == len(path) or path.startswith("...", position) or path[position] == "."
        if not token or not separated:
            raise ValueError(f"`{path}` cannot be read at character {position + 1}")
        segments.append(token)
        position += not path.startswith("...", position)
    return segments


def unquote(segment: str) -> str:
    """A segment as written, taken literally."""
    return json.loads(segment) if segment.startswith('"') else segment


def matcher(segment: str) -> Matcher:
    """What a glob's segment accepts."""
    if segment == SPREAD:
        return None
    if segment.startswith('"'):
        return unquote(segment)
    if match := re.fullmatch(r"(\d+)-(\d+)", segment):
        return re.compile("|".join(str(index) for index in range(int(match[1]), min(int(match[2]), int(match[1]) + 9999) + 1)) or "(?!)")
    if not set("*?{") & set(segment):
        return segment
    expression = ""
    for piece in re.findall(r"\{[^{}]*\}|.", segment):
        if len(piece) > 1:
            expression += "(?:" + "|".join(re.escape(option.strip()) for option in piece[1:-1].split(",")) + ")"
        else:
            expression += {"*": ".*", "?": "."}.get(piece, re.escape(piece))
    return re.compile(expression)


def matches(pattern: Sequence[Matcher], segments: Sequence[str]) -> bool:
    """Whether the glob chooses the path with these (unquoted) segments."""
    for index, accepted in enumerate(pattern):
        if accepted is None:
            return any(matches(pattern[index + 1 :], segments[start:]) for start in range(index, len(segments) + 1))
        if index >= len(segments):
            return False
        if accepted != segments[index] if isinstance(accepted, str) else not accepted.fullmatch(segments[index]):
            return False
    return len(pattern) == len(segments)


def folded(path: str) -> str:
    """The path with indices replaced by `*`: what is the same in equal layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
