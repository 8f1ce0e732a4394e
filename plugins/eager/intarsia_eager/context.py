"""The sequence side of a training forward pass: packed documents, no caches.

Shape suffixes: B rows, S tokens, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from intarsia import ops
from intarsia.contracts import Mixer
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_eager.following import FOLLOWING

if TYPE_CHECKING:
    from intarsia.contracts import Batch
    from torch import nn


class TrainContext:
    """A SequenceContext over whole rows: every token of a row is new and no cache is kept. Stability: provisional.

    Arguments: `positions_BS` int64, each token's position in its document; `documents_BS` integer, one number for each document of a
    row (None: one document to a row); `lengths` the same on the host, where it is known, which spares kernels a copy from the
    device; `windows` the attention windows that the model's mixers use (`windows_of`), for kernels that prepare masks; `following_BSK` the tokens further on,
    for models that predict further ahead; `routes_BSLK` the experts that a generator chose; `extra` what the loader added to the batch.

    It serves softmax, latent and recurrent mixers; an indexed one is refused by name.
    """

    def __init__(
        self,
        positions_BS: Tensor,
        documents_BS: Tensor | None = None,
        lengths: tuple[tuple[int, ...], ...] | None = None,
        windows: Sequence[int | None] = (None,),
        following_BSK: Tensor | None = None,
        routes_BSLK: Tensor | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.positions_BS, self.following_BSK, self.routes_BSLK = positions_BS, following_BSK, routes_BSLK
        self.extra: Mapping[str, Any] = extra or {}
        self.packing = None if lengths is None else ops.Packing(lengths)
        # Rows of one document each need no document numbers, and plain causal attention is the fast path of every kernel.
        self.documents_BS = None if self.packing is not None and self.packing.single else documents_BS
        if self.documents_BS is not None:
            ops.attention.prepare(self.packing, windows=tuple(windows), documents_BS=self.documents_BS)

    @classmethod
    def of(cls, batch: Batch, windows: Sequence[int | None] = (None,)) -> TrainContext:
        """The context of one batch."""
        extra = batch.extra
        return cls(batch.positions_BS, batch.documents_BS, batch.lengths, windows, extra.get(FOLLOWING), extra.get("routes_BSLK"), extra)

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
        """Causal softmax attention within each document. Returns [B, S, H, Dv]."""
        documents = self.documents_BS
        return ops.attention(
            q_BSHD,
            k_BSKD,
            v_BSKD,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_H=sinks_H,
            documents_q_BS=documents,
            documents_k_BT=documents,
            packing=self.packing,
        )

    def latent(self, mixer: str, latent_BSC: Tensor, attend: Callable[..., Tensor], **settings: Any) -> Tensor:
        """Attention over a latent: in training `attend` sees the whole row, its positions and its documents."""
        return attend(latent_BSC, self.positions_BS, self.documents_BS, **settings)

    def recurrent(self, mixer: str, cache: str, update: Callable[..., Any], *inputs: Tensor, **settings: Any) -> Tensor:
        """A recurrence: `update` starts from its zero state in every document of a row and returns (outputs, state)."""
        outputs, _ = update(*inputs, state=None, documents_BS=self.documents_BS, counts_B=None, **settings)
        return outputs

    def indexed(self, mixer: str, *inputs: Tensor, **settings: Any) -> Tensor:
        """Refused: attention by an indexer needs a context that keeps index keys."""
        served = "it serves softmax, latent and recurrent mixers"
        raise UsageError(f"Mixer {mixer!r} asks for a context of kind 'indexed', which {type(self).__name__} does not serve ({served}).")


def windows_of(model: nn.Module) -> tuple[int | None, ...]:
    """The attention windows that a model's mixers declare in their caches, for TrainContext."""
    specs = [module.cache_spec() for module in model.modules() if isinstance(module, Mixer)]
    windows = dict.fromkeys(cache.window for spec in specs for cache in spec.caches)
    return tuple(windows) or (None,)
