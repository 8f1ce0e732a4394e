"""Records (JSON objects, table rows) to documents, with errors that say which record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.contracts import Document, Message, ToolCall, ToolSpec
from intarsia.errors import UsageError, did_you_mean


def parse_json(text: str, where: str) -> Any:
    """The JSON value of a line. Errors: UsageError that names it by `where`. Stability: provisional."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where}: not valid JSON: {error}.") from None
    except RecursionError:
        raise UsageError(f"{where}: not valid JSON: it is nested too deeply.") from None


def to_document(record: Any, field: str, where: str, trained: str = "trained") -> Document:
    """The document in `record[field]`: a string is text, a list of {role, content} objects a conversation, a list of integers token ids.

    A turn may have `tool_calls`, and a record with a conversation `tools`, both as chat services write them: {name, arguments} and {name, description, parameters}, also within {type, function}.
    Arguments: `where` names the record in messages ("data/a.jsonl:17"); `trained` is the field with the mask of token ids, which need not be there.
    Errors: UsageError that names the record, the field and what was found. Stability: stable.
    """
    if not isinstance(record, Mapping):
        raise UsageError(f"{where}: expected an object with named fields, found {type(record).__name__}.")
    if field not in record:
        raise UsageError(
            f"{where}: there is no field {field!r}. Fields here: {', '.join(map(repr, record)) or 'none'}. {did_you_mean(field, record)}"
        )
    value = record[field]
    if isinstance(value, str):
        return Document(text=encodable(value, where, repr(field)))
    if isinstance(value, Sequence) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        if wrong := [item for item in value if not 0 <= item < 1 << 32]:
            raise UsageError(f"{where}: field {field!r} holds {wrong[0]}, which can be no token id.")
        return _token_document(value, record.get(trained), where, field, trained)
    if isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
        messages = tuple(_message(item, f"{where}: {field}[{number}]") for number, item in enumerate(value))
        return Document(messages=messages, tools=to_tools(record.get("tools"), where) if messages else ())
    raise UsageError(
        f"{where}: field {field!r} holds {_kind(value)}; a document is a string, a list of objects with role and content, or a list of token ids."
    )


def _token_document(ids: Sequence[int], mask: Any, where: str, field: str, trained: str) -> Document:
    """Token ids with their mask, of equal lengths."""
    if mask is None:
        return Document(tokens=tuple(ids))
    if not isinstance(mask, Sequence) or not all(isinstance(item, bool) or item in (0, 1) for item in mask):
        raise UsageError(f"{where}: field {trained!r} must be a list of true and false, one for each token id of {field!r}.")
    if len(mask) != len(ids):
        raise UsageError(f"{where}: {len(ids)} token ids in {field!r} but {len(mask)} values in {trained!r}; there must be one for each.")
    return Document(tokens=tuple(ids), trained=tuple(bool(item) for item in mask))


def _message(item: Mapping[str, Any], where: str) -> Message:
    """One turn, checked."""
    calls = item.get("tool_calls")
    if calls and item.get("content") is None:  # what is nothing but calls is often written so
        item = {**item, "content": ""}
    for key in ("role", "content"):
        if not isinstance(item.get(key), str):
            found = f"holds {_kind(item[key])}" if key in item else f"is missing; fields here: {', '.join(map(repr, item)) or 'none'}"
            raise UsageError(f"{where}: {key!r} must be a string, but {found}.")
    trained = item.get("trained")
    if trained is not None and not isinstance(trained, bool):
        raise UsageError(f"{where}: 'trained' must be true, false or absent, but holds {_kind(trained)}.")
    content = encodable(item["content"], where, "'content'")
    role = encodable(item["role"], where, "'role'")
    return Message(role=role, content=content, trained=trained, tool_calls=to_tool_calls(calls, where))


def to_tool_calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    """A turn's calls of tools. Arguments are a JSON object, or its text. Errors: UsageError that names the turn by `where`. Stability: provisional."""
    found = []
    for number, call in enumerate(_objects(calls, where, "tool_calls")):
        function = call.get("function", call)
        name, arguments = (function.get(key) if isinstance(function, Mapping) else None for key in ("name", "arguments"))
        if not isinstance(name, str) or not isinstance(arguments, str | Mapping):
            raise UsageError(f"{where}: tool_calls[{number}] must have a name (a string) and arguments (an object, or its JSON text).")
        text = arguments if isinstance(arguments, str) else _json_of(arguments, where, f"tool_calls[{number}].arguments")
        named = str(call.get("id") or f"call-{number + 1}")
        found.append(ToolCall(*(encodable(each, where, "'tool_calls'") for each in (named, name, text))))
    return tuple(found)


def to_tools(tools: Any, where: str) -> tuple[ToolSpec, ...]:
    """The tools that a conversation is offered. Errors: UsageError that names the record by `where`. Stability: provisional."""
    found = []
    for number, tool in enumerate(_objects(tools, where, "tools")):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        description, parameters = (function.get("description") or "", function.get("parameters") or {}) if name else ("", {})
        if not (isinstance(name, str) and isinstance(description, str) and isinstance(parameters, Mapping)):
            raise UsageError(f"{where}: tools[{number}] must have a name and a description (strings), and parameters (a JSON schema).")
        for each in (name, description, _json_of(parameters, where, f"tools[{number}].parameters")):
            encodable(each, where, "'tools'")
        found.append(ToolSpec(name, description, dict(parameters)))
    return tuple(found)


def _json_of(value: Any, where: str, field: str) -> str:
    """`value` as JSON. Errors: UsageError for what JSON has not (NaN, dates of a table), and for more levels than it can be written in."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise UsageError(f"{where}: {field} is nested too deeply.") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: {field} is no JSON: {error}.") from None


def _objects(value: Any, where: str, field: str) -> Sequence[Mapping[str, Any]]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, Mapping) for item in value):
        raise UsageError(f"{where}: {field!r} must be a list of objects, but holds {_kind(value)}.")
    return value


def encodable(text: str, where: str, field: str) -> str:
    """`text`, which UTF-8 can hold: JSON may escape half of a surrogate pair, which is no character. Stability: provisional."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: {field} has a lone surrogate ({text[error.start]!a}) as its character {error.start}.") from None
    return text


def _kind(value: Any) -> str:
    """What a value is, for messages."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "a list of " + (" and ".join(sorted({type(item).__name__ for item in value})) or "nothing")
    return "null" if value is None else f"a value of type {type(value).__name__}"
