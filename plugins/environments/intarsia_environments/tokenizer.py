"""The tokenizer `characters`: so few ids that a policy finds right answers by chance. Torch-free."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

from intarsia.contracts import Message, ToolSpec
from intarsia.errors import UsageError
from intarsia_data.tokenizer import encode_parts, render_turns

from intarsia_environments.config import CharactersConfig

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class CharacterTokenizer:
    """The characters of an alphabet are ids from 0 on; then an id for every other character, the end of a turn, which also ends a text, one marker for each role, and the further special tokens.

    A conversation is, for each turn: the role's marker, the content, end of turn.
    """

    bos_id = None

    def __init__(self, config: CharactersConfig):
        for name, items in (("alphabet", config.alphabet), ("roles", config.roles), ("specials", config.specials)):
            twice = sorted({item for item in items if items.count(item) > 1})
            if twice:
                raise UsageError(f"characters tokenizer: {name} names {', '.join(map(repr, twice))} twice.")
        self._characters = config.alphabet
        self._ids = {character: number for number, character in enumerate(config.alphabet)}
        self.unknown_id = len(self._ids)
        self.eos_id = self.pad_id = self.unknown_id + 1
        self.role_ids = {role: self.eos_id + 1 + number for number, role in enumerate(config.roles)}
        first = self.eos_id + 1 + len(config.roles)
        self.special_ids = {text: first + number for number, text in enumerate(config.specials)}
        self.vocab_size = first + len(config.specials)
        self.byte_lengths = [len(character.encode()) for character in config.alphabet] + [0] * (self.vocab_size - len(self._ids))

    def encode(self, text: str) -> list[int]:
        """One id for each character."""
        return [self._ids.get(character, self.unknown_id) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The characters; U+FFFD where it was an unknown one, nothing where it is none."""
        known = len(self._characters)
        return "".join(self._characters[number] if number < known else REPLACEMENT for number in ids if 0 <= number <= known)

    def lacking(self, text: str) -> str:
        """The characters of a text that have no id of their own, each once."""
        return "".join(dict.fromkeys(character for character in text if character not in self._ids))

    def special_id(self, text: str) -> int | None:
        """The id of one of the further special tokens."""
        return self.special_ids.get(text)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[list[int], list[bool]]:
        """Ids of a conversation and their mask. It has no form for tools and their calls."""
        encode = functools.partial(encode_parts, encode=self.encode, vocab_size=self.vocab_size)
        return render_turns("characters tokenizer", self.role_ids, self.eos_id, encode, messages, tools)

    def fingerprint(self) -> str:
        """Over alphabet, roles and special tokens."""
        specials = f" {tuple(self.special_ids)}" if self.special_ids else ""
        text = f"characters 1 {self._characters!r} {tuple(self.role_ids)}{specials}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
