"""What a mixer (attention of any kind, a recurrence) is given by whoever runs it, and what it declares. Torch-free at import.

A family is defined once. Its mixers never build masks or caches: they call the SequenceContext, and the runtime (trainer,
embedded generator, a serving engine) supplies one that trains packed sequences, reads a paged cache, or shards the context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

ContextKind = Literal["softmax", "latent", "recurrent", "indexed"]


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSpec:
    """One named cache of a mixer. Stability: provisional.

    `storage` is `"paged"` (one entry of `shape` for each token) or `"state"` (one of `shape` for each sequence). `window` bounds how
    many past tokens a paged cache must keep (None: all).
    """

    name: str
    storage: Literal["paged", "state"]
    shape: tuple[int, ...]
    dtype: str
    window: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MixerSpec:
    """What a mixer asks of a context: its kind and its caches. Stability: provisional."""

    kind: ContextKind
    caches: tuple[CacheSpec, ...]


@runtime_checkable
class Mixer(Protocol):
    """A module that mixes along the sequence. Stability: provisional."""

    def cache_spec(self) -> MixerSpec:
        """The caches that generation needs, with shapes for one token or one sequence, on one device."""


class SequenceContext(Protocol):
    """The sequence side of one forward pass. Stability: provisional.

    A batch is B rows of S tokens; a row may pack several documents. `positions_BS` (int64) is each token's position in its own
    document. A context that cannot serve a kind raises UsageError naming the kind, the mixer and itself.
    A context may have an attribute `extra`, a mapping of what the loader adds to a batch: of `positions_3BS` (int64: positions in time, height and width, where they
    differ), and of media `patches_NC` (float32: N patches of C values; or a function that makes them, for whoever looks), `grids` (frames, rows and columns of patches of each image or video, in order) and
    `visual_BS` (int64: which visual feature stands in this token's place, -1: none); `padding_BS` (bool) where some tokens only fill rows.
    Where `patches_NC` is there it is so on every rank, with no rows where a rank has no images.
    `mixer` arguments are the mixer module's dotted name in the model, which is also its cache's key. For models that predict further ahead
    a context of training has an attribute `following_BSK` (int64): the tokens 1 to K places further on, 0 where there is none. It is absent or None else. One that
    replays what a generator's routers chose has `routes_BSLK` (int16): the K experts of each token in each of the L layers that choose, -1 where they choose themselves.
    """

    positions_BS: Tensor

    def softmax(
        self,
        mixer: str,
        q_BSHD: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Causal softmax attention of the new tokens over everything visible to them. Returns [B, S, H, Dv]."""

    def latent(self, mixer: str, latent_BSC: Tensor, attend: Callable[..., Tensor], **settings: Any) -> Tensor:
        """Attention over a compressed latent (MLA): the context keeps the latent and calls `attend(latent_BTC, positions_BT, documents_BT, **settings)`
        with all that it keeps: each entry's position, and its document (negative: an empty slot; None in place of the tensor: all are one). What the
        new tokens may see of it is `attend`'s to decide, by `ops.attention`: their own positions are the context's `positions_BS`, their documents its `documents_BS`
        (absent or None: they belong to every document that is there). Where `positions_BT` is `positions_BS` itself, the entries are the new tokens, in order. A
        context may know better than a mask of positions what is seen: it then has a method `attention(q_BSHD, k_BTKD, v_BTKD, scale=...)`, causal softmax attention
        of the new tokens over keys and values made of all entries that it handed out, which `attend` calls in the place of `ops.attention`. Returns what `attend`
        returns."""

    def recurrent(self, mixer: str, cache: str, update: Callable[..., Any], *inputs: Tensor, **settings: Any) -> Tensor:
        """A recurrence with a state for each sequence, which is the mixer's cache of this name. `inputs` are [B, S, ...]; anything else goes into `settings`. The context
        calls `update(*inputs, state=..., documents_BS=..., counts_B=..., **settings)`, which returns (outputs, new state), and keeps the state between calls; `state`
        None is the beginning. `update` begins anew wherever the document changes within a row; of row b only the first `counts_B[b]` tokens are real (None: all), and
        those behind leave the state as it was.
        For rows that are cut over ranks `update` needs two functions: `carry(*inputs, documents_BS=..., **settings)`, a tuple of tensors [B, ...] that says what
        these tokens do to any state (its last: the state at their end, from zeros), and `combine(earlier, later)`, the carry of both. Returns the outputs."""

    def indexed(self, mixer: str, *inputs: Tensor, **settings: Any) -> Tensor:
        """Attention over tokens chosen by an indexer: the context keeps keys, values and index keys."""
