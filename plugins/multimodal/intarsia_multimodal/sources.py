"""Sources of documents with media: JSON lines, and folders of images with captions."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intarsia.contracts import Document, Media, Message, Parts
from intarsia.errors import UsageError, did_you_mean
from intarsia_data.files import decode, expand, fingerprint
from intarsia_data.records import encodable, parse_json, to_tool_calls, to_tools
from intarsia_data.sources import FileSource

from intarsia_multimodal.config import MediaFolderConfig, MediaJsonlConfig, ReadingConfig
from intarsia_multimodal.contracts import MediaError
from intarsia_multimodal.media import is_url, opened

KINDS = ("image", "video")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".ogv")
FIELDS = ("text", "parts", "messages")
BESIDE = ("image", "images", "video", "videos", "tools")
READ_BESIDE = {"text": ("images", "videos"), "messages": ("tools",)}
"""Of these fields, which are read beside each of FIELDS."""


class MediaJsonlSource(FileSource):
    """One JSON object on each line, with one of three fields:

    * `text`, a string, before which the object's `images` and `videos`, if it has them, stand;
    * `parts`, strings and media in turns;
    * `messages`, a list of `{"role": ..., "content": ...}` whose content is a string or parts.

    A conversation may have `tools`, and its turns `tool_calls`, as `intarsia_data.records.to_document` reads them.

    A medium is `{"image": REFERENCE}` or `{"video": REFERENCE}`, the reference being a path, `data:...;base64,...`, `{"base64": ...}`, or, for a video, a list of frames'
    references. A part `{"text": ...}`, with or without `"type"`, is the same as its string. Text is text: what looks like a special token in it is none.
    """

    def __init__(self, config: MediaJsonlConfig):
        super().__init__("media_jsonl", config, b"\n")
        self._roots = [Path(os.path.expanduser(root)).resolve() for root in config.roots]
        for root in self._roots:
            if not root.is_dir():
                raise UsageError(f"media_jsonl: roots names {root}, which is no folder.")

    def __getitem__(self, index: int) -> Document:
        text, where = self._text(index, "{file}:{line}")
        record = parse_json(text, where)
        if not isinstance(record, Mapping):
            raise UsageError(f"{where}: expected an object with named fields, found {type(record).__name__}.")
        return _Reader(where, [self.file_of(index).resolve().parent, *self._roots]).document(record)


class _Reader:
    """Turns one record into a document; `where` names it in messages, `roots` are the folders in which its media may lie."""

    def __init__(self, where: str, roots: Sequence[Path]):
        self._where, self._roots = where, roots

    def document(self, record: Mapping[str, Any]) -> Document:
        """The document of a record."""
        given = [field for field in FIELDS if record.get(field) is not None]
        if len(given) != 1:
            found = f"has {' and '.join(given)}" if given else f"has {', '.join(map(repr, record)) or 'no field'}"
            raise UsageError(f"{self._where}: a document has one of the fields {', '.join(FIELDS)}; this one {found}.")
        self._check_fields(record, given[0], "it")
        if given == ["messages"]:
            messages = self._list(record["messages"], "messages")
            turns = tuple(self._message(item, f"messages[{number}]") for number, item in enumerate(messages))
            return Document(messages=turns, tools=to_tools(record.get("tools"), self._where) if turns else ())
        if given == ["parts"]:
            return Document(parts=self._parts(record["parts"], "parts"))
        media = [
            self._medium(kind, item, f"{kind}s[{number}]")
            for kind in KINDS
            for number, item in enumerate(self._list(record.get(f"{kind}s") or [], f"{kind}s"))
        ]
        return Document(parts=(*media, self._text(record["text"], "text")))

    def _check_fields(self, record: Mapping[str, Any], field: str, what: str) -> None:
        """UsageError for a field that would say something elsewhere: what it holds must not be lost in silence."""
        unread = [name for name in BESIDE if record.get(name) and name not in READ_BESIDE.get(field, ())]
        if unread:
            hint = did_you_mean(unread[0], READ_BESIDE["text"]) if field == "text" else "Give media as parts, where they stand."
            raise UsageError(f"{self._where}: {what} has the field {unread[0]!r}, which is not read there, beside `{field}`. {hint}")

    def _message(self, item: Any, field: str) -> Message:
        if not isinstance(item, Mapping) or not isinstance(item.get("role"), str) or "content" not in item:
            raise UsageError(f"{self._where}: {field} must be an object with role and content.")
        self._check_fields(item, "content", field)
        calls = to_tool_calls(item.get("tool_calls"), f"{self._where}: {field}")
        trained, content = item.get("trained"), item["content"]
        if calls and content is None:  # what is nothing but calls is often written so
            content = ""
        if trained is not None and not isinstance(trained, bool):
            raise UsageError(f"{self._where}: {field}.trained must be true, false or absent.")
        held = self._text(content, f"{field}.content") if isinstance(content, str) else self._parts(content, f"{field}.content")
        return Message(item["role"], held, trained, calls)

    def _parts(self, value: Any, field: str) -> Parts:
        return tuple(self._part(item, f"{field}[{number}]") for number, item in enumerate(self._list(value, field)))

    def _part(self, item: Any, field: str) -> str | Media:
        if isinstance(item, str):
            return self._text(item, field)
        if isinstance(item, Mapping):
            named = [key for key in item if key != "type"]
            if len(named) == 1 and item.get("type", named[0]) == named[0]:
                if named[0] == "text":
                    return self._text(item["text"], field)
                if named[0] in KINDS:
                    return self._medium(named[0], item[named[0]], field)
            raise UsageError(
                f'{self._where}: {field} has the fields {", ".join(map(repr, item)) or "none"}; a part is a string, {{"text": ...}}, {{"image": ...}} or '
                f'{{"video": ...}}. {did_you_mean(str(named[0]), ("text", *KINDS)) if named else ""}'.rstrip()
            )
        raise UsageError(f"{self._where}: {field} holds {type(item).__name__}; a part is a string or an object.")

    def _medium(self, kind: str, reference: Any, field: str) -> Media:
        if kind == "video" and isinstance(reference, list):
            frames = [self._reference(item, f"{field}[{number}]") for number, item in enumerate(reference)]
            return Media("video", tuple(self._content(frame) for frame in frames))
        return Media(kind, self._reference(reference, field))  # type: ignore[arg-type]

    def _reference(self, reference: Any, field: str) -> bytes | str:
        """A file's path, an URL, or bytes."""
        if isinstance(reference, Mapping) and isinstance(reference.get("base64"), str):
            return self._decoded(reference["base64"], field)
        if not isinstance(reference, str):
            raise UsageError(
                f'{self._where}: {field} must be a path, "data:...;base64,..." or {{"base64": ...}}, not {type(reference).__name__}.'
            )
        if reference.startswith("data:"):
            head, _, data = reference.partition(",")
            if not head.endswith(";base64"):
                raise MediaError(f"{self._where}: {field} begins with {head[:40]!r}; only data:...;base64, is read")
            return self._decoded(data, field)
        return reference if is_url(reference) else self._path(reference, field)

    def _decoded(self, text: str, field: str) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise MediaError(f"{self._where}: {field} is not valid base64: {error}") from error

    def _path(self, reference: str, field: str) -> str:
        """The file that a path names, which must lie in one of the roots, links followed."""
        try:
            found = [Path(os.path.realpath(root / reference)) for root in self._roots]
            inside = [path for path in found if any(path.is_relative_to(root) for root in self._roots)]
            there = next((path for path in inside if path.is_file()), None)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise MediaError(f"{self._where}: {field} names {reference!r:.100}, which is no path: {reason}") from error
        if not inside:
            raise MediaError(
                f"{self._where}: {field} names {reference}, which lies outside {', '.join(map(str, self._roots))}. Name its folder in roots to allow it"
            )
        return str(there or inside[0])

    def _content(self, reference: bytes | str) -> bytes:
        """A frame's content: a video that is given as frames holds them."""
        if isinstance(reference, bytes):
            return reference
        if is_url(reference):
            raise MediaError(f"{self._where}: a video's frame is named by an URL, {reference}; give frames as files or base64")
        try:
            with opened(reference, ReadingConfig()) as file:
                return file.read()
        except MediaError as error:
            raise MediaError(f"{self._where}: {reference}: {error}") from error

    def _list(self, value: Any, field: str) -> list[Any]:
        if not isinstance(value, list):
            raise UsageError(f"{self._where}: {field} must be a list, not {type(value).__name__}.")
        return value

    def _text(self, value: Any, field: str) -> str:
        if not isinstance(value, str):
            raise UsageError(f"{self._where}: {field} must be a string, not {type(value).__name__}.")
        return encodable(value, self._where, field)


class MediaFolderSource:
    """Images and videos, each with its caption in a text file beside it."""

    def __init__(self, config: MediaFolderConfig):
        self._config = config
        found = expand(config.paths, "media_folder")
        self.files = [path for path in found if path.suffix.lower() in IMAGES + VIDEOS]
        if not self.files:
            raise UsageError(
                f"media_folder: {', '.join(config.paths)} match {len(found)} files, none of them an image or video ({' '.join(IMAGES + VIDEOS)})."
            )
        if lacking := [path for path in self.files if not path.with_suffix(".txt").is_file()]:
            raise UsageError(
                f"media_folder: {len(lacking)} of {len(self.files)} media have no caption; {lacking[0]} needs {lacking[0].with_suffix('.txt').name} beside it."
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Document:
        path = self.files[index]
        beside = path.with_suffix(".txt")
        try:
            caption = decode(beside.read_bytes(), "strict", str(beside)).strip()
        except OSError as error:
            raise UsageError(f"{beside}: cannot be read: {error}.") from error
        medium = Media("image" if path.suffix.lower() in IMAGES else "video", str(path))
        if not self._config.prompt:
            return Document(parts=(medium, caption))
        return Document(messages=(Message("user", (medium, self._config.prompt)), Message("assistant", caption)))

    def fingerprint(self) -> str:
        """Over names, sizes and times of media and captions, and the prompt."""
        return fingerprint([*self.files, *(path.with_suffix(".txt") for path in self.files)], "media_folder", self._config.prompt)
