"""Records (JSON objects, table rows) to documents, with errors that say which record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.contracts import Document, Message
from intarsia.errors import UsageError, did_you_mean


def to_document(record: Any, field: str, where: str, trained: str = "trained") -> Document:
    """The document in `record[field]`: a string is text, a list of {role, content} objects a conversation, a list of integers token ids.

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
        return Document(text=_encodable(value, where, repr(field)))
    if isinstance(value, Sequence) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        if wrong := [item for item in value if not 0 <= item < 1 << 32]:
            raise UsageError(f"{where}: field {field!r} holds {wrong[0]}, which can be no token id.")
        return _token_document(value, record.get(trained), where, field, trained)
    if isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value):
        return Document(messages=tuple(_message(item, f"{where}: {field}[{number}]") for number, item in enumerate(value)))
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
    for key in ("role", "content"):
        if not isinstance(item.get(key), str):
            found = f"holds {_kind(item[key])}" if key in item else f"is missing; fields here: {', '.join(map(repr, item)) or 'none'}"
            raise UsageError(f"{where}: {key!r} must be a string, but {found}.")
    trained = item.get("trained")
    if trained is not None and not isinstance(trained, bool):
        raise UsageError(f"{where}: 'trained' must be true, false or absent, but holds {_kind(trained)}.")
    return Message(role=item["role"], content=_encodable(item["content"], where, "'content'"), trained=trained)


def _encodable(text: str, where: str, field: str) -> str:
    """`text`, which UTF-8 can hold: JSON may escape half of a surrogate pair, which is no character."""
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
