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
    """The characters of an alphabet are ids from 0 on; then an id for every other character, the end of a turn, which also ends a text, and one marker for each role.

    A conversation is, for each turn: the role's marker, the content, end of turn.
    """

    bos_id = None

    def __init__(self, config: CharactersConfig):
        for name, items in (("alphabet", config.alphabet), ("roles", config.roles)):
            twice = sorted({item for item in items if items.count(item) > 1})
            if twice:
                raise UsageError(f"characters tokenizer: {name} names {', '.join(map(repr, twice))} twice.")
        self._characters = config.alphabet
        self._ids = {character: number for number, character in enumerate(config.alphabet)}
        self.unknown_id = len(self._ids)
        self.eos_id = self.pad_id = self.unknown_id + 1
        self.role_ids = {role: self.eos_id + 1 + number for number, role in enumerate(config.roles)}
        self.vocab_size = self.eos_id + 1 + len(config.roles)
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
        """None: it has no special tokens that are called anything."""
        return None

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[list[int], list[bool]]:
        """Ids of a conversation and their mask. It has no form for tools and their calls."""
        encode = functools.partial(encode_parts, encode=self.encode, vocab_size=self.vocab_size)
        return render_turns("characters tokenizer", self.role_ids, self.eos_id, encode, messages, tools)

    def fingerprint(self) -> str:
        """Over alphabet and roles."""
        return hashlib.blake2b(f"characters 1 {self._characters!r} {tuple(self.role_ids)}".encode(), digest_size=16).hexdigest()
