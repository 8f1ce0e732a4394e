"""The sequence side of our models inside vLLM: a SequenceContext over its paged cache.

vLLM hands over the new tokens of all requests one behind another; the model gets them as one row of documents. Attention is computed for each request by itself, over the request's own entries in
order, so that what it gives depends on nothing else in the batch.

Shape suffixes: T new tokens of all requests, E entries of all requests, R requests of one call, S new tokens of a request, L entries of a request, H query heads, K key/value heads, D head dim,
C width of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import torch
from intarsia import ops
from intarsia.contracts import Mixer, MixerSpec
from intarsia.errors import PluginError, UsageError, did_you_mean
from torch import Tensor, nn

SERVED = ("softmax", "latent")


class Metadata(Protocol):
    """What the context asks of a step; `backend.PagedMetadata` is one."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """New tokens of each request."""


class Cache(Protocol):
    """What the context asks of a mixer's cache; `backend.CacheLayer` is one."""

    def exchange(self, new_TKW: Tensor, metadata: Any) -> Tensor:
        """Keep the new tokens' entries; returns all entries of all requests, [E, K, W]."""


def specs_of(model: nn.Module) -> dict[str, MixerSpec]:
    """What each mixer of a model asks for. UsageError, naming it, where one asks for what cannot be kept in vLLM's paged cache."""
    specs = {name: module.cache_spec() for name, module in model.named_modules() if isinstance(module, Mixer)}
    for mixer, spec in specs.items():
        if spec.kind not in SERVED or any(cache.storage != "paged" for cache in spec.caches):
            refuse(mixer, spec.kind, f" of {type(model).__name__}")
        if len({cache.dtype for cache in spec.caches}) > 1 or len({cache.shape[:-1] for cache in spec.caches}) > 1:
            raise UsageError(f"Mixer {mixer!r} keeps caches of different dtypes or heads; vLLM's paged cache has one of each for a layer.")
    return specs


def refuse(mixer: str, kind: str, whose: str = "") -> NoReturn:
    """Say that a kind of context is not there."""
    raise UsageError(
        f"Mixer {mixer!r}{whose} asks for a context of kind {kind!r}, which the vLLM integration does not serve (it serves {' and '.join(SERVED)}, whose caches have "
        "an entry for each token), so this model cannot run in vLLM. Take the embedded generator (data.loader.generator=local), which serves recurrences too, or a model without such mixers."
    )


class PagedContext:
    """A SequenceContext for one forward pass of vLLM. Stability: provisional.

    Arguments: `positions_T` are the new tokens' positions in their requests; `specs` and `caches` those of the mixers by name; `metadata` the step's requests, and None in a pass that vLLM makes to
    measure memory: nothing is kept then. `together` has all requests in one call of `ops.attention`, as one row of documents: for kernels whose work and memory are those of what is seen.
    """

    def __init__(
        self,
        positions_T: Tensor,
        specs: Mapping[str, MixerSpec],
        caches: Mapping[str, Cache],
        metadata: Metadata | None,
        together: bool = False,
    ) -> None:
        self.together = together
        self.positions_BS = positions_T[None]
        self.specs, self.caches, self.metadata = specs, caches, metadata
        self.documents_BS: Tensor | None = None
        if metadata is not None:
            self._plan(metadata)

    def _plan(self, metadata: Metadata) -> None:
        """Which queries and which entries belong together, for all layers."""
        device = self.positions_BS.device
        counts, lengths = metadata.counts, metadata.lengths
        requests = torch.arange(len(counts), device=device)
        self.documents_BS = torch.repeat_interleave(requests, torch.tensor(counts, device=device))[None]
        self._positions_E = torch.cat([torch.arange(length, device=device) for length in lengths])
        self._documents_E = torch.repeat_interleave(requests, torch.tensor(lengths, device=device))
        self._mask = {
            "documents_q_BS": self.documents_BS,
            "documents_k_BT": self._documents_E[None],
            "positions_q_BS": self.positions_BS,
            "positions_k_BT": self._positions_E[None],
        }
        if self.together:
            return
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        # Requests with one new token each go through attention together, padded to the longest; longer pieces one by one.
        single = [request for request, count in enumerate(counts) if count == 1]
        several = [[request] for request, count in enumerate(counts) if count > 1]
        self._groups = [_Group(metadata, group, ends, device) for group in ([single] if single else []) + several]

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
        """Causal softmax attention of each request's new tokens over its entries. Returns [1, T, H, Dv]."""
        self._check(mixer, "softmax")
        settings: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks_H": sinks_H}
        if self.metadata is None:
            return ops.attention(q_BSHD, k_BSKD, v_BSKD, **settings)
        entries_EKW = self.caches[mixer].exchange(torch.cat((k_BSKD, v_BSKD), -1)[0], self.metadata)
        k_EKD, v_EKD = entries_EKW.split((k_BSKD.shape[-1], v_BSKD.shape[-1]), -1)
        return self._attend(q_BSHD, k_EKD, v_EKD, settings)

    def latent(self, mixer: str, latent_BSC: Tensor, attend: Callable[..., Tensor], **settings: Any) -> Tensor:
        """Attention over a latent: `attend` is given the entries of all requests as one row of documents, and calls `attention` back."""
        self._check(mixer, "latent")
        if self.metadata is None:
            return attend(latent_BSC, self.positions_BS, None, **settings)
        entries_E1C = self.caches[mixer].exchange(latent_BSC[0, :, None], self.metadata)
        return attend(entries_E1C[None, :, 0], self._positions_E[None], self._documents_E[None], **settings)

    def attention(self, q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, *, scale: float) -> Tensor:
        """What `attend` calls: attention over keys and values that it made of all entries."""
        if self.metadata is None:
            return ops.attention(q_BSHD, k_BTKD, v_BTKD, scale=scale)
        return self._attend(q_BSHD, k_BTKD[0], v_BTKD[0], {"scale": scale})

    def recurrent(self, mixer: str, cache: str, update: Callable[..., Any], *inputs: Tensor, **settings: Any) -> Tensor:
        """Refused."""
        refuse(mixer, "recurrent")

    def indexed(self, mixer: str, *inputs: Tensor, **settings: Any) -> Tensor:
        """Refused."""
        refuse(mixer, "indexed")

    def _attend(self, q_BSHD: Tensor, k_EKD: Tensor, v_EKD: Tensor, settings: Mapping[str, Any]) -> Tensor:
        if self.together:
            return ops.attention(q_BSHD, k_EKD[None], v_EKD[None], **settings, **self._mask)
        q_THD = q_BSHD[0]
        out_THD = q_THD.new_zeros((*q_THD.shape[:2], v_EKD.shape[-1]))
        for group in self._groups:
            out_THD[group.queries_N] = group.attend(q_THD, k_EKD, v_EKD, settings).flatten(0, 1)
        return out_THD[None]

    def _check(self, mixer: str, kind: str) -> None:
        spec = self.specs.get(mixer)
        if spec is None:
            raise PluginError(f"Mixer {mixer!r} is no module with a cache_spec(). {did_you_mean(mixer, self.specs)}")
        if spec.kind != kind:
            raise PluginError(f"Mixer {mixer!r} calls {kind}(), but its cache_spec() says {spec.kind!r}.")


class _Group:
    """Requests with equally many new tokens, attended to in one call."""

    def __init__(self, metadata: Metadata, requests: list[int], ends: list[int], device: torch.device) -> None:
        counts, lengths = metadata.counts, [metadata.lengths[request] for request in requests]
        new = counts[requests[0]]
        first_R1 = torch.tensor([metadata.starts[request] for request in requests], device=device)[:, None]
        self.queries_RS = first_R1 + torch.arange(new, device=device)
        self.queries_N = self.queries_RS.flatten()
        # Nothing was there before: plain causal attention over the new tokens, the fast path of every kernel.
        self.fresh = len(requests) == 1 and lengths[0] == new
        length_R1 = torch.tensor(lengths, device=device)[:, None]
        positions_L = torch.arange(max(lengths), device=device)
        there_RL = positions_L < length_R1
        begin_R1 = torch.tensor([ends[request] for request in requests], device=device)[:, None]
        # Padded with a request's own first entry: what is not finite in another's would spoil sums even where its weight is 0.
        self.entries_RL = begin_R1 + torch.where(there_RL, positions_L, 0)
        self.mask = {
            "positions_q_BS": length_R1 - new + torch.arange(new, device=device),
            "positions_k_BT": torch.where(there_RL, positions_L, -1),
            "documents_q_BS": torch.zeros_like(self.queries_RS),
            "documents_k_BT": torch.where(there_RL, 0, -1),
        }

    def attend(self, q_THD: Tensor, k_EKD: Tensor, v_EKD: Tensor, settings: Mapping[str, Any]) -> Tensor:
        """[R, S, H, Dv]."""
        q_RSHD, k_RLKD, v_RLKD = q_THD[self.queries_RS], k_EKD[self.entries_RL], v_EKD[self.entries_RL]
        return ops.attention(q_RSHD, k_RLKD, v_RLKD, **settings, **({} if self.fresh else self.mask))
