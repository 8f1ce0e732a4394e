"""The tokenizer `templated`: another one, with conversations by a chat template. Torch-free where that one is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intarsia.contracts import Message, Tokenizer, ToolSpec
from intarsia.errors import UsageError
from intarsia.plugins import Plugins, current
from intarsia_data.records import encodable

from intarsia_chat.config import TemplatedConfig
from intarsia_chat.contracts import ChatTemplate, ToolFormat
from intarsia_chat.conversation import Conversation

LARGEST_TEMPLATE = 1 << 20


class TemplatedTokenizer:
    """A Tokenizer that encodes as `inner` does and renders by a template. Stability: provisional.

    Besides the contract: `prompt` gives the ids up to where the assistant speaks, `stop_ids` what ends its turn, `conversation` and `tool_format` serve renderers. Nothing is put around what it
    renders (`frames_conversations`): the template has begun and ended it.
    """

    frames_conversations = True

    def __init__(self, inner: Tokenizer, template: ChatTemplate, tool_format: ToolFormat | None, config: TemplatedConfig):
        self.inner, self.template, self.tool_format = inner, template, tool_format
        variables: dict[str, Any] = dict(config.variables)
        if config.thinking is not None:
            variables["enable_thinking"] = config.thinking
        self.conversation = Conversation(template, inner, variables, config.characters, config.date)
        self.vocab_size = inner.vocab_size
        self.bos_id, self.eos_id, self.pad_id = inner.bos_id, inner.eos_id, inner.pad_id
        self.stop_ids = self.conversation.stop_ids
        self.special_ids = self.conversation.special_ids
        # What some tokenizers offer besides the contract.
        for name in ("byte_lengths", "encode_batch"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))
        settings = json.dumps([inner.fingerprint(), template.text, variables, config.date], sort_keys=True)
        self._fingerprint = hashlib.blake2b(f"templated 1 {settings}".encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are text."""
        return self.inner.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`."""
        return self.inner.decode(ids)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[list[int], list[bool]]:
        """A conversation as the template writes it. Of the assistant's turns content, calls and end of turn are trained on, where the turn is."""
        return self.conversation.render(messages, tools)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """A conversation up to where the assistant speaks next."""
        return self.conversation.prompt(messages, tools)

    def special_id(self, text: str) -> int | None:
        """The id of the special token whose content is `text`."""
        return self.special_ids.get(text)

    def fingerprint(self) -> str:
        """Over the other tokenizer, the template's text and its variables."""
        return self._fingerprint


def build(config: TemplatedConfig) -> TemplatedTokenizer:
    """The tokenizer. UsageError where template and tokenizer do not fit."""
    plugins = current()
    inner: Tokenizer = plugins.build(config.tokenizer)
    if isinstance(inner, TemplatedTokenizer):
        raise UsageError("templated: data.tokenizer.tokenizer is templated, too. Name the tokenizer of the text.")
    template = find_template(config.template, inner, plugins)
    name = config.tool_format or template.tool_format
    registry = plugins.registry("tool format")
    tool_format = plugins.target(registry.find(name))() if name else None
    return TemplatedTokenizer(inner, template, tool_format, config)


def find_template(name: str, inner: Tokenizer, plugins: Plugins) -> ChatTemplate:
    """The template that `data.tokenizer.template` names. UsageError where there is none."""
    if name == "folder":
        return _of_folder(inner)
    if name.endswith(".jinja") or "/" in name:
        return _of_text(_read(Path(name).expanduser()), name)
    entry = plugins.registry("chat template").find(name)
    made: ChatTemplate = plugins.target(entry)()
    return made


def _of_folder(inner: Tokenizer) -> ChatTemplate:
    """The template beside a tokenizer's files."""
    path = getattr(inner, "path", None)
    if path is None:
        raise UsageError(
            f"templated: template=folder asks for the template beside a tokenizer's files, and {type(inner).__name__} has none. Name a template."
        )
    folder = Path(path).parent
    if (own := folder / "chat_template.jinja").is_file():
        return _of_text(_read(own), str(own))
    beside = folder / "tokenizer_config.json"
    try:
        settings = json.loads(_read(beside)) if beside.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise UsageError(f"templated: {beside} is not valid JSON: {error}.") from error
    found = settings.get("chat_template") if isinstance(settings, Mapping) else None
    if isinstance(found, list):  # several by name
        named = {str(item.get("name")): item.get("template") for item in found if isinstance(item, Mapping)}
        found = named.get("default", named.get("tool_use"))
    if not isinstance(found, str):
        raise UsageError(
            f"templated: template=folder, but {folder} has neither a chat_template.jinja nor a chat_template in its tokenizer_config.json. Name a template (data.tokenizer.template=chatml), or the "
            "path of a .jinja file."
        )
    return _of_text(found, str(beside))


def _of_text(text: str, where: str) -> ChatTemplate:
    """A template of which only the text is known. How its model calls tools is told by what it writes."""
    encodable(text, f"templated: {where}", "the template")
    form = "qwen_xml" if "<function=" in text else "hermes" if "<tool_call>" in text else None
    return ChatTemplate(where, text, tool_format=form, where=where)


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST_TEMPLATE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"templated: {path} cannot be read: {error}. data.tokenizer.template is a template's name, `folder`, or the path of a .jinja file."
        ) from error
    if len(text) > LARGEST_TEMPLATE and path.suffix == ".jinja":
        raise UsageError(f"templated: {path} is longer than {LARGEST_TEMPLATE:,} characters, which is no chat template.")
    return text
