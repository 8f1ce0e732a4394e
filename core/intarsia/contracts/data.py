"""Documents, tokenizers and batches. Torch-free at import."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100
"""The label of a token that is not trained on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `trained` None means: trained when the role is assistant. Stability: stable."""

    role: str
    content: str
    trained: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One item of a source: plain text, a conversation, or token ids with an optional mask of trained tokens. Stability: stable."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    tokens: tuple[int, ...] | None = None
    trained: tuple[bool, ...] | None = None


@runtime_checkable
class DataSource(Protocol):
    """A finite, indexable, unchanging list of documents. Order, shuffling, epochs, packing and sharding are the loader's. Stability: stable."""

    def __len__(self) -> int:
        """How many documents there are."""
        ...

    def __getitem__(self, index: int) -> Document:
        """Document `index`, the same one whenever and wherever asked."""
        ...

    def fingerprint(self) -> str:
        """Equal exactly when the documents are equal; cheap (names, sizes and times of files will do). Resume compares it."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back. Stability: stable."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no special tokens are added and none is recognised in the text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        ...

    def render(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """A conversation's ids and, for each, whether it is trained on."""
        ...

    def fingerprint(self) -> str:
        """Equal exactly when encode and render behave the same."""
        ...


@dataclasses.dataclass(frozen=True)
class Batch:
    """One micro-batch on one rank: B rows of S tokens. Stability: provisional.

    `lengths[b]` are the lengths of the documents packed into row b, in order, summing to S: the one source of truth from which
    `positions_BS` (int64, restarting at each document) and `documents_BS` (int32, 0, 1, ... along the row) are made. A document that began in an
    earlier sample continues as a document of its own here. `labels_BS` holds the next token's id, or IGNORE (padding,
    untrained turns, a document's last token where nothing follows in it).
    `samples` are the global numbers of the rows.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor
    lengths: tuple[tuple[int, ...], ...]
    samples: tuple[int, ...] = ()
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


PackingKind = Literal["concatenate", "one_per_row"]
