"""The source `preferences`: of pair n document 2 n is the chosen answer behind its prompt, 2 n + 1 the rejected one. Torch-free.

A prompt that is a string is the user's turn, an answer that is one the assistant's. Only answers are trained on; within them, as messages say. Pairs are of text: a record with images or videos is refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from intarsia.contracts import Document, Message
from intarsia.errors import UsageError
from intarsia_data.records import to_document
from intarsia_data.sources import FileSource

from intarsia_rl.preferences.config import PreferenceFilesConfig

MEDIA = ("image", "images", "image_url", "video", "videos", "video_url")
"""Fields that hold media where data sets have them."""


class PreferenceFiles(FileSource):
    """See the module; a DataSource."""

    pairs = True

    def __init__(self, config: PreferenceFilesConfig) -> None:
        super().__init__("preferences", config, b"\n")  # type: ignore[arg-type]  # what it reads of a config, this one has
        self._fields = config

    def __len__(self) -> int:
        return 2 * super().__len__()

    def __getitem__(self, index: int) -> Document:
        text, where = self._text(index // 2, "{file}:{line}")
        try:
            record = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{where}: not valid JSON: {error}.") from None
        return pair_of(record, self._fields, where)[index % 2]


def pair_of(record: Any, fields: PreferenceFilesConfig, where: str) -> tuple[Document, Document]:
    """(chosen, rejected), each with its prompt. UsageError that names the record and what is wrong with it."""
    _check_is_text(record, fields, where)
    answers = [to_document(record, name, where) for name in (fields.chosen, fields.rejected)]
    prompt = to_document(record, fields.prompt, where) if isinstance(record, Mapping) and fields.prompt in record else None
    if any(answer.tokens is not None for answer in answers):
        return _of_tokens(prompt, answers, fields, where)
    if prompt is not None and prompt.tokens is not None:
        raise UsageError(
            f"{where}: {fields.prompt!r} holds token ids, so {fields.chosen!r} and {fields.rejected!r} must hold some as well."
        )
    turns = [_turns(answer, "assistant") for answer in answers]
    before = () if prompt is None else _turns(prompt, "user")
    if prompt is None:
        if answers[0].messages is None or answers[1].messages is None:
            raise UsageError(
                f"{where}: there is no field {fields.prompt!r}, and the answers are no whole conversations (lists of objects with role and content)."
            )
        common = next((at for at, (one, other) in enumerate(zip(*turns, strict=False)) if one != other), min(map(len, turns)))
        before, turns = turns[0][:common], [each[common:] for each in turns]
    if not turns[0] or not turns[1] or turns[0] == turns[1]:
        raise UsageError(
            f"{where}: {fields.chosen!r} and {fields.rejected!r} are the same, or one of them only begins the other: there is nothing to prefer."
        )
    silent = tuple(dataclasses.replace(turn, trained=False) for turn in before)
    return Document(messages=(*silent, *turns[0])), Document(messages=(*silent, *turns[1]))


def _check_is_text(record: Any, fields: PreferenceFilesConfig, where: str) -> None:
    """UsageError for images and videos, beside the fields that are read and in them: none must be lost in silence."""
    if not isinstance(record, Mapping):
        return
    read = (fields.prompt, fields.chosen, fields.rejected)
    found = [name for name in MEDIA if record.get(name) and name not in read] or [name for name in read if _shows(record.get(name))]
    if found:
        raise UsageError(
            f"{where}: there are images or videos in the field {found[0]!r}, and pairs are of text alone: the model would learn to prefer answers to what it does not see. Leave such pairs out, or train "
            "on chosen answers, with data.loader=multimodal and another loss."
        )


def _shows(value: Any) -> bool:
    """Whether a conversation, a turn or its content has a part that is an image or a video, as chat services write them."""
    if isinstance(value, list):
        return any(_shows(item) for item in value)
    return isinstance(value, Mapping) and (
        any(value.get(name) or value.get("type") == name for name in MEDIA) or _shows(value.get("content"))
    )


def _turns(document: Document, role: str) -> tuple[Message, ...]:
    return document.messages if document.messages is not None else (Message(role, document.text or ""),)


def _of_tokens(prompt: Document | None, answers: list[Document], fields: PreferenceFilesConfig, where: str) -> tuple[Document, Document]:
    if prompt is None or any(each.tokens is None for each in (prompt, *answers)):
        raise UsageError(
            f"{where}: where one of {fields.prompt!r}, {fields.chosen!r} and {fields.rejected!r} holds token ids, all three must be there and hold some."
        )
    first, (one, other) = prompt.tokens or (), [answer.tokens or () for answer in answers]
    if one == other or not one or not other:
        raise UsageError(
            f"{where}: {fields.chosen!r} and {fields.rejected!r} are the same, or one of them is empty: there is nothing to prefer."
        )
    made = [Document(tokens=first + ids, trained=(False,) * len(first) + (True,) * len(ids)) for ids in (one, other)]
    return made[0], made[1]
