"""What stands in a text that a template handles for what it must not see: special tokens that somebody typed, and token ids.

A template works on plain text (it trims, splits, compares), so what goes in has to be text that behaves as the content does. Each of these becomes one character of the planes that Unicode
leaves to private use, which nothing trims or matches, and is put back behind the template. Such characters that were typed are put aside in the same way, so that none is mistaken.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from intarsia.contracts import Media
from intarsia.errors import UsageError
from intarsia_data.tokenizer import no_tokens_for

from intarsia_chat.formats.values import DEEPEST

FIRST, LAST = 0xF0000, 0x10FFFF
SHELL = 3
"""Levels around a tool's schema: the list of tools, the tool, its function."""
PRIVATE = f"[{chr(FIRST)}-{chr(LAST)}]"


class Special(str):
    """A special token, which the template wrote."""


class Text(str):
    """Text of a template and in it."""


Piece = Special | Text | tuple[int, ...]


def special_pattern(special: Iterable[str]) -> re.Pattern[str]:
    """Finds special tokens in a text, the longest one at each place."""
    texts = sorted((text for text in special if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) if texts else "(?!)")


class Guard:
    """The characters of one rendering. `special` finds special tokens."""

    def __init__(self, special: re.Pattern[str]):
        self._typed = re.compile(f"{special.pattern}|{PRIVATE}")
        self._held: list[str | tuple[int, ...]] = []
        self._of_text: dict[str, str] = {}
        self._reasoning: dict[int, str] = {}
        self._tokens: dict[int, str] = {}

    def typed(self, text: str, but: Collection[str] = ()) -> str:
        """`text` as a template may see it. Special tokens named by `but` stay."""

        def replaced(found: re.Match[str]) -> str:
            if found[0] in but:
                return found[0]
            if found[0] not in self._of_text:
                self._of_text[found[0]] = self._hold(found[0])
            return self._of_text[found[0]]

        return self._typed.sub(replaced, text)

    def ids(self, ids: Sequence[int] = ()) -> str:
        """A character, unlike all others, for token ids."""
        return self._hold(tuple(ids))

    def reasoning(self, message: int) -> str:
        """A character that stands for the reasoning of a message."""
        self._reasoning[message] = self.ids()
        return self._reasoning[message]

    def keeps(self, message: int, text: str) -> bool:
        """Whether `text` holds the reasoning of a message; True where that has none."""
        return self._reasoning.get(message, "") in text

    def token(self, number: int) -> str:
        """The character of one token that has no text, the same one each time."""
        if number not in self._tokens:
            self._tokens[number] = self.ids([number])
        return self._tokens[number]

    def _hold(self, what: str | tuple[int, ...]) -> str:
        if FIRST + len(self._held) > LAST:
            raise UsageError(f"A conversation holds more than {LAST - FIRST + 1:,} runs of token ids between pieces of text.")
        self._held.append(what)
        return chr(FIRST + len(self._held) - 1)

    def content(self, content: str | Sequence[str | int | Media], but: Collection[str] = ()) -> str:
        """A message's content as a template may see it. UsageError for media."""
        if isinstance(content, str):
            return self.typed(content, but)
        made: list[str] = []
        # Texts in a row are one text: a special token may have been typed across their border.
        for kind, run in itertools.groupby(content, type):
            if issubclass(kind, str):
                made.append(self.typed("".join(map(str, run)), but))
            elif issubclass(kind, int):
                made.append(self.ids([int(part) for part in run if not isinstance(part, str | Media)]))
            else:
                raise no_tokens_for(next(part for part in run if isinstance(part, Media)))
        return "".join(made)

    def values(self, value: Any, level: int = 0) -> Any:
        """JSON values with all texts in them as a template may see them. UsageError for more than DEEPEST levels of them."""
        if level > DEEPEST + SHELL:
            raise UsageError(f"A tool, or the arguments of a call, are nested in more than {DEEPEST} levels, which no template writes.")
        if isinstance(value, str):
            return self.typed(value)
        if isinstance(value, dict):
            return {self.typed(str(key)): self.values(item, level + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.values(item, level + 1) for item in value]
        return value

    def pieces(self, text: str) -> Iterator[tuple[int, int, Piece]]:
        """A rendered text in order: (first character, last + 1, what stands there): a special token of the template's, ids, or text, which `back` completes."""
        begin = 0
        for found in self._typed.finditer(text):
            if FIRST <= ord(found[0][0]) <= LAST and isinstance(self._held_by(found[0]), str):
                continue
            if found.start() > begin:
                yield begin, found.start(), Text(text[begin : found.start()])
            private = FIRST <= ord(found[0][0]) <= LAST
            yield found.start(), found.end(), self._held_by(found[0]) if private else Special(found[0])  # type: ignore[misc]  # texts were passed over
            begin = found.end()
        if begin < len(text):
            yield begin, len(text), Text(text[begin:])

    def back(self, text: str) -> str:
        """Text of the template, with what was typed as it was typed."""
        return re.sub(PRIVATE, lambda found: str(self._held_by(found[0])), text)

    def _held_by(self, character: str) -> str | tuple[int, ...]:
        return self._held[ord(character) - FIRST]
