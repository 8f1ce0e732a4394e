"""The byte tokenizer, and the check that a tokenizer fits a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy
from intarsia.contracts import Message
from intarsia.errors import UsageError, did_you_mean

from intarsia_data.config import ByteTokenizerConfig


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; then bos 256, eos 257, pad 258, end of turn 259, and from 260 on one marker for each role.

    A conversation is, for each turn: the role's marker, the content's bytes, end of turn. Content and end of turn are trained on where
    the turn is.
    """

    bos_id, eos_id, pad_id, end_of_turn_id = 256, 257, 258, 259

    def __init__(self, config: ByteTokenizerConfig):
        if len(set(config.roles)) != len(config.roles):
            raise UsageError(f"byte tokenizer: a role is named twice in {config.roles}.")
        self.role_ids = {role: 260 + number for number, role in enumerate(config.roles)}
        self.vocab_size = 260 + len(config.roles)
        self.byte_lengths = [1] * 256 + [0] * (self.vocab_size - 256)

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[numpy.ndarray]:
        """`encode` of many, as arrays: without a Python object for each byte."""
        return [numpy.frombuffer(text.encode(), dtype=numpy.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes; other ids have none."""
        return bytes(number for number in ids if 0 <= number < 256).decode("utf-8", "replace")

    def render(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Ids of a conversation and their mask."""
        ids: list[int] = []
        mask: list[bool] = []
        for message in messages:
            if message.role not in self.role_ids:
                raise UsageError(f"byte tokenizer: there is no role {message.role!r}. {did_you_mean(message.role, self.role_ids)}")
            content = self.encode(message.content)
            ids += [self.role_ids[message.role], *content, self.end_of_turn_id]
            mask += [False] + [is_trained(message)] * (len(content) + 1)
        return ids, mask

    def fingerprint(self) -> str:
        """Over the roles."""
        return hashlib.blake2b(f"byte 1 {tuple(self.role_ids)}".encode(), digest_size=16).hexdigest()


def is_trained(message: Message) -> bool:
    """Whether a turn is trained on: as it says itself, else when the assistant speaks. Stability: stable."""
    return message.role == "assistant" if message.trained is None else message.trained
