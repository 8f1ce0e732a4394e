"""Documents, tokenizers and batches. Torch-free at import."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from intarsia.contracts.environment import ToolCall, ToolSpec
    from intarsia.contracts.state import StateItem

# The label of a token that is not trained on.
IGNORE = -100


@dataclasses.dataclass(frozen=True, slots=True)
class Media:
    """An image or a video: a file's content, a file's path, or a video's frames as files' contents. `media_type` as in MIME, where it is known. Stability: provisional."""

    kind: Literal["image", "video"]
    data: bytes | str | tuple[bytes, ...]
    media_type: str = ""


# Text, token ids that are taken as they are (special tokens are never recognised in text), and media.
Parts = tuple[str | int | Media, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `trained` None means: trained when the role is assistant. Stability: stable."""

    role: str
    content: str | Parts
    trained: bool | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One item of a source: plain text, text and media in turns (`parts`), a conversation with the tools that it is offered, or token ids with an optional mask of trained
    tokens. Stability: stable."""

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    tokens: tuple[int, ...] | None = None
    trained: tuple[bool, ...] | None = None
    parts: Parts | None = None
    tools: tuple[ToolSpec, ...] = ()


@runtime_checkable
class DataSource(Protocol):
    """A finite, indexable, unchanging list of documents. Order, shuffling, epochs, packing and sharding are the loader's. Stability: stable."""

    def __len__(self) -> int:
        """How many documents there are."""

    def __getitem__(self, index: int) -> Document:
        """Document `index`, the same one whenever and wherever asked."""

    def fingerprint(self) -> str:
        """Equal exactly when the documents are equal; cheap (names, sizes and times of files will do). Resume compares it."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back. Stability: stable."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no special tokens are added and none is recognised in the text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[list[int], list[bool]]:
        """A conversation's ids and, for each, whether it is trained on. UsageError for media, which a processor turns into ids first, and for tools where it has no form for them."""

    def special_id(self, text: str) -> int | None:
        """The id of the special token whose content is `text`; None: there is none."""

    def fingerprint(self) -> str:
        """Equal exactly when encode and render behave the same."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """One micro-batch on one rank: B rows of S tokens. Stability: provisional.

    `lengths[b]` are the lengths of the documents packed into row b, in order, summing to S: the one source of truth from which
    `positions_BS` (int64, restarting at each document) and `documents_BS` (int32, 0, 1, ... along the row) are made. A document that began in an
    earlier sample continues as a document of its own here. `labels_BS` holds the next token's id, or IGNORE (padding,
    untrained turns, a document's last token where nothing follows in it).
    `samples` are the global numbers of the rows. `extra` is the loader's own, tensors included, and functions without arguments that make one where it is needed; `extra["bytes"]`, where it is known, is how many
    bytes of text the counted labels stand for: evaluation makes bits per byte of it.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor
    lengths: tuple[tuple[int, ...], ...]
    samples: tuple[int, ...] = ()
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Loader(Protocol):
    """This rank's micro-batches of each global step, and the exact position, which is Stateful state of the owner `data`. Stability: provisional.

    `total` is the number of samples after which the data ends (None: never), `samples` and `steps` what was given out so far over all ranks. Where a loader says by an attribute
    `depends_on` (JSON) what the order of samples depends on, ranks compare it before the first step.
    """

    tokenizer: Tokenizer
    total: int | None
    samples: int
    steps: int

    def next_step(self) -> list[Batch] | None:
        """The next global step's micro-batches, the same number on every rank; None at the end of the data, on all ranks alike."""

    def reset(self, samples: int = 0, steps: int = 0) -> None:
        """Set the position."""

    def facts(self) -> dict[str, Any]:
        """What the run records about its data: documents, tokens, fingerprints."""

    def close(self) -> None:
        """End what runs in the background."""

    def state(self) -> list[StateItem]:
        """The position, valid at any number of ranks."""

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """Go on after the saved position; refuse data that has changed."""
