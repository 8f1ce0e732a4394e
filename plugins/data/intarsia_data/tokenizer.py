"""The byte tokenizer, and the parts that a message's content is made of."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy
from intarsia.contracts import Media, Message, Parts, ToolSpec
from intarsia.errors import UsageError, did_you_mean

from intarsia_data.config import ByteTokenizerConfig


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; then bos 256, eos 257, pad 258, end of turn 259, from 260 on one marker for each role, and then the further special tokens.

    A conversation is, for each turn: the role's marker, the content's bytes, end of turn. Content and end of turn are trained on where
    the turn is.
    """

    bos_id, eos_id, pad_id, end_of_turn_id = 256, 257, 258, 259

    def __init__(self, config: ByteTokenizerConfig):
        if len(set(config.roles)) != len(config.roles):
            raise UsageError(f"byte tokenizer: a role is named twice in {config.roles}.")
        if len(set(config.specials)) != len(config.specials) or "" in config.specials:
            raise UsageError(f"byte tokenizer: a special token is named twice, or has no name, in {config.specials}.")
        self.role_ids = {role: 260 + number for number, role in enumerate(config.roles)}
        self.special_ids = {text: 260 + len(config.roles) + number for number, text in enumerate(config.specials)}
        self.vocab_size = 260 + len(config.roles) + len(config.specials)
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

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[list[int], list[bool]]:
        """Ids of a conversation and their mask. It has no form for tools and their calls."""
        encode = functools.partial(encode_parts, encode=self.encode, vocab_size=self.vocab_size)
        return render_turns("byte tokenizer", self.role_ids, self.end_of_turn_id, encode, messages, tools)

    def special_id(self, text: str) -> int | None:
        """The id of one of the further special tokens."""
        return self.special_ids.get(text)

    def fingerprint(self) -> str:
        """Over the roles and special tokens."""
        settings = (tuple(self.role_ids), *((tuple(self.special_ids),) if self.special_ids else ()))
        return hashlib.blake2b(f"byte 1 {' '.join(map(str, settings))}".encode(), digest_size=16).hexdigest()


def render_turns(
    name: str,
    role_ids: Mapping[str, int],
    end_id: int,
    encode: Callable[[str | Parts], list[int]],
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
) -> tuple[list[int], list[bool]]:
    """A conversation and its mask as the role's marker, the content and `end_id` for each turn; content and end are trained on where the turn is.

    Errors: UsageError that begins with `name`, for a role without a marker, and for tools and their calls, of which this has no form. Stability: provisional.
    """
    if tools or any(message.tool_calls for message in messages):
        raise UsageError(f"{name}: it has no form for tools and their calls. Use a tokenizer with a chat template.")
    ids: list[int] = []
    mask: list[bool] = []
    for message in messages:
        if message.role not in role_ids:
            raise UsageError(f"{name}: there is no role {message.role!r}. {did_you_mean(message.role, role_ids)}")
        content = encode(message.content)
        ids += [role_ids[message.role], *content, end_id]
        mask += [False] + [is_trained(message)] * (len(content) + 1)
    return ids, mask


def encode_parts(content: str | Parts, encode: Callable[[str], Sequence[int]], vocab_size: int) -> list[int]:
    """Ids of a message's content, or of a document's parts: text is encoded, ids are taken as they are.

    Errors: UsageError for media, which a processor turns into ids first, and for an id that there is not. Stability: stable.
    """
    ids: list[int] = []
    for part in (content,) if isinstance(content, str) else content:
        if isinstance(part, str):
            ids += encode(part)
        elif isinstance(part, Media):
            raise no_tokens_for(part)
        elif 0 <= part < vocab_size:
            ids.append(part)
        else:
            raise UsageError(f"token id {part} is out of range: the tokenizer has the ids 0 to {vocab_size - 1}")
    return ids


def no_tokens_for(medium: Media) -> UsageError:
    """What is to be said of a medium where only text has tokens. Stability: provisional."""
    return UsageError(
        f"it holds a medium ({medium.kind}), which text alone has no tokens for. Set data.loader=multimodal, and its processor to the model's; pairs of answers (data.loader=preferences) are of text alone."
    )


def text_of(content: str | Parts) -> str:
    """The text in a message's content, or in a document's parts. Stability: stable."""
    return content if isinstance(content, str) else "".join(part for part in content if isinstance(part, str))


def is_trained(message: Message) -> bool:
    """Whether a turn is trained on: as it says itself, else when the assistant speaks. Stability: stable."""
    return message.role == "assistant" if message.trained is None else message.trained
