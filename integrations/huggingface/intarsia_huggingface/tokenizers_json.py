"""Any `tokenizer.json` as an Intarsia tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from intarsia.contracts import Message, ToolSpec
from intarsia.errors import UsageError, did_you_mean
from intarsia_data.tokenizer import encode_parts, is_trained
from tokenizers import Tokenizer

from intarsia_huggingface.config import TokenizerJsonConfig


class TokenizerJson:
    """The tokenizer in a file, with the special tokens that the config or `tokenizer_config.json` names.

    Special tokens in a document's text are text and never become special ids. In a conversation only `turn_start` and `turn_end` are read with
    special tokens. `byte_lengths` (bytes of text for each id) is there for byte-level tokenizers, else None. `special_ids` are the special tokens' ids by their text.
    """

    def __init__(self, config: TokenizerJsonConfig):
        path = Path(config.path).expanduser()
        self.path = path / "tokenizer.json" if path.is_dir() else path
        if not self.path.is_file():
            raise UsageError(
                f"tokenizer_json: {self.path} does not exist. Set data.tokenizer.path to a tokenizer.json or the folder it lies in."
            )
        if "{role}" not in config.turn_start and config.turn_start:
            raise UsageError(f"tokenizer_json: turn_start={config.turn_start!r} must contain {{role}}: else a turn's role is lost.")
        content = self.path.read_bytes()
        self._config = config
        self._plain, marked = _load(content, self.path), _load(content, self.path)
        self._plain.encode_special_tokens = True
        starts = {role: config.turn_start.replace("{role}", role) for role in config.roles}
        self._starts = {role: marked.encode(text, add_special_tokens=False).ids for role, text in starts.items()}
        self._end = marked.encode(config.turn_end, add_special_tokens=False).ids
        self._vocabulary: dict[str, int] = self._plain.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1
        beside = _read_beside(self.path.with_name("tokenizer_config.json"))
        self.bos_id = self._special("bos", config.bos, beside.get("bos_token"))
        self.eos_id = self._special("eos", config.eos, beside.get("eos_token"))
        self.pad_id = self._special("pad", config.pad, beside.get("pad_token"))
        added = self._plain.get_added_tokens_decoder()
        self.special_ids = {
            token.content: number
            for number, token in sorted(added.items())
            if token.special or number in (self.bos_id, self.eos_id, self.pad_id)
        }
        self.byte_lengths = _byte_lengths(json.loads(content), self._plain, self.vocab_size)
        settings = (self.bos_id, self.eos_id, config.turn_start, config.turn_end, config.roles)
        self._fingerprint = hashlib.blake2b(content + repr(settings).encode(), digest_size=16).hexdigest()

    def _special(self, name: str, chosen: str | None, beside: Any) -> int | None:
        """The id of a special token, from the config if it says so, else from the file beside."""
        text = (beside.get("content") if isinstance(beside, dict) else beside) if chosen is None else chosen
        if not text:
            return None
        if text not in self._vocabulary:
            raise UsageError(f"tokenizer_json: {name}={text!r} is no token of {self.path}. {did_you_mean(text, self._special_names())}")
        return self._vocabulary[text]

    def _special_names(self) -> list[str]:
        """The tokens that were added to the vocabulary, among them all special ones."""
        return [token.content for token in self._plain.get_added_tokens_decoder().values()]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many, on all cores."""
        return [encoding.ids for encoding in self._plain.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, without special tokens."""
        return self._plain.decode(list(ids), skip_special_tokens=True)

    def special_id(self, text: str) -> int | None:
        """The id of the special token whose content is `text`."""
        return self.special_ids.get(text)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[list[int], list[bool]]:
        """For each turn: `turn_start` with its role, the content, `turn_end`. Content and `turn_end` are trained on where the turn is. It has no form for tools and their calls."""
        config = self._config
        if tools or any(message.tool_calls for message in messages):
            raise UsageError(
                "tokenizer_json: turn_start and turn_end have no form for tools and their calls. Use a chat template: data.tokenizer=templated, and this tokenizer in it."
            )
        if not config.turn_start:
            raise UsageError(
                "tokenizer_json: conversations need to know how turns are marked. Set data.tokenizer.turn_start (with {role} in it) and "
                "data.tokenizer.turn_end, as the model's chat template has them; or use the template itself: data.tokenizer=templated, with this tokenizer in it."
            )
        ids: list[int] = []
        mask: list[bool] = []
        for message in messages:
            if message.role not in config.roles:
                raise UsageError(f"tokenizer_json: there is no role {message.role!r}. {did_you_mean(message.role, config.roles)}")
            start, rest = self._starts[message.role], [*encode_parts(message.content, self.encode, self.vocab_size), *self._end]
            ids += start + rest
            mask += [False] * len(start) + [is_trained(message)] * len(rest)
        return ids, mask

    def fingerprint(self) -> str:
        """Over the file's content and the settings."""
        return self._fingerprint


def _load(content: bytes, path: Path) -> Tokenizer:
    """The tokenizer without its cutting and padding. Errors: UsageError that names the file."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:
        raise UsageError(f"tokenizer_json: {path} cannot be read: {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_beside(path: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, or nothing where there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"tokenizer_json: {path} is not valid JSON: {error}.") from error
    return content if isinstance(content, dict) else {}


def _byte_lengths(content: dict[str, Any], tokenizer: Tokenizer, size: int) -> list[int] | None:
    """Bytes of text for each id of a byte-level tokenizer, whose tokens are written with one character for each byte; special ones have none."""
    if (content.get("decoder") or {}).get("type") != "ByteLevel":
        return None
    lengths = [0] * size
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        lengths[number] = len(token)
    for number, added in tokenizer.get_added_tokens_decoder().items():
        lengths[number] = 0 if added.special else len(added.content.encode())
    return lengths
