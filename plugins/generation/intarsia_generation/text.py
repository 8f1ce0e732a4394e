"""Tokens to text as they come: never half a character, and never a piece of what may become a stop text. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 16
"""Tokens after which an incomplete character is taken for a broken one and shown as it is."""


class IncrementalText:
    """The text of a growing list of tokens.

    `text` is what is final so far. `add` returns what may be shown now; together with `finish` that is `text`. `stopped_by` is the stop text that was met:
    `text` ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._begin = self._read = 0
        self._shown = 0
        self.text = ""
        self.stopped_by: str | None = None

    def add(self, token: int) -> str:
        """Take one token."""
        self._ids.append(token)
        new = self._decode()
        # Text that a later token may still change: a character whose bytes are not all there.
        if new.endswith(REPLACEMENT) and len(self._ids) - self._read < LONGEST_CHARACTER:
            return ""
        return self._take(new)

    def finish(self) -> str:
        """Nothing follows: what was held back."""
        shown = self._take(self._decode())
        rest, self._shown = self.text[self._shown :], len(self.text)
        return shown + rest

    def stops(self, token: int, is_last: bool) -> bool:
        """Take one token; whether a stop text is complete with it. Behind the last one nothing is held back."""
        self.add(token)
        if self.stopped_by is None and is_last:
            self.finish()
        return self.stopped_by is not None

    def _decode(self) -> str:
        """The text of the tokens that are not read yet. They are decoded behind those before, on which spaces may depend."""
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        return self._tokenizer.decode(self._ids[self._begin :])[len(before) :]

    def _take(self, new: str) -> str:
        if self.stopped_by is not None:
            return ""
        if new:
            self._begin, self._read = self._read, len(self._ids)
        searched = max(0, len(self.text) - max(map(len, self._stop), default=1) + 1)
        self.text += new
        found = [(position, stop) for stop in self._stop if (position := self.text.find(stop, searched)) >= 0]
        if found:
            position, self.stopped_by = min(found)
            self.text = self.text[:position]
            ready = len(self.text)
        else:
            ready = len(self.text) - self._held()
        shown, self._shown = self.text[self._shown : ready], max(self._shown, ready)
        return shown

    def _held(self) -> int:
        """Characters at the end that begin a stop text."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
