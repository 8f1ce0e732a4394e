"""What the formats share: JSON to the letter, and tools as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.contracts import ToolCall, ToolSpec
from intarsia.errors import UsageError

WHITE = re.compile(r"\s*")
DEEPEST = 100
"""Levels of objects and lists in a call. What was read must be written again, wherever that is: Python's own bound counts who called, too."""


def tool_object(tool: ToolSpec) -> dict[str, Any]:
    """A tool as templates and models are told of it."""
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}}


def tool_json(tool: ToolSpec, indent: int | None = None) -> str:
    """The same as text."""
    return to_json(tool_object(tool), indent)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON with characters as they are."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)


def strict(text: str, begin: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at `begin`, and where it ends. ValueError where there is none, for a name twice in an object, for constants that JSON has not, and for more
    than DEEPEST levels."""
    try:
        found: tuple[Any, int] = _DECODER.raw_decode(text, begin)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    level = [found[0]]
    for _ in range(DEEPEST + 1):
        level = [
            item for value in level if isinstance(value, dict | list) for item in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise ValueError(f"nested in more than {DEEPEST} levels")
    return found


def encodable(value: Any) -> None:
    """ValueError for JSON with half a character in it (an escaped lone surrogate), which no tokenizer could encode."""
    to_json(value).encode()


def behind_white(text: str, begin: int) -> int:
    """The place of the first character at or behind `begin` that is no white space."""
    return WHITE.match(text, begin).end()  # type: ignore[union-attr]  # it matches nothing, too


def arguments_of(call: ToolCall, form: str) -> dict[str, Any]:
    """A call's arguments. UsageError where they are no JSON object."""
    try:
        value, end = strict(call.arguments)
        encodable(value)
    except ValueError as error:
        raise UsageError(f"{form}: the arguments of the call of {call.name!r} are no JSON: {error}.") from error
    if not isinstance(value, dict) or call.arguments[end:].strip():
        raise UsageError(f"{form}: the arguments of the call of {call.name!r} are no JSON object.")
    return value


def call_of(number: int, name: Any, arguments: Any) -> ToolCall:
    """Call `number` (from 1). ValueError where that is none."""
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        raise ValueError("a call has a name, and an object of arguments")
    encodable(name)
    encodable(arguments)
    return ToolCall(f"call-{number}", name, to_json(arguments))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice in an object")
    return made


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique)
