"""The sequence side of generation: keys and values of what was seen stay, and new tokens attend to them; of recurrences a state for each sequence stays.

Shape suffixes: B sequences, S new tokens, T slots of a cache, H query heads, K key/value heads, D head dim, C width of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from intarsia import ops
from intarsia.contracts import CacheSpec, Mixer, MixerSpec
from intarsia.errors import PluginError, UsageError, did_you_mean
from torch import Tensor, nn

SERVED = {"softmax": "paged", "latent": "paged", "recurrent": "state"}
"""Kinds of mixers, and how what they keep is stored."""
FIRST_SLOTS = 64


SERVES = "softmax and latent mixers with paged caches, recurrent ones with states"


def specs_of(model: nn.Module, context: str) -> dict[str, MixerSpec]:
    """The mixers of a model and what they ask for. UsageError, naming kind and mixer, for what `context` (its name) does not serve."""
    specs = {name: module.cache_spec() for name, module in model.named_modules() if isinstance(module, Mixer)}
    for mixer, spec in specs.items():
        if spec.kind not in SERVED or any(cache.storage != SERVED[spec.kind] for cache in spec.caches):
            refuse(spec.kind, mixer, context)
    return specs


def refuse(kind: str, mixer: str, context: str) -> NoReturn:
    """UsageError for what `context` does not serve."""
    raise UsageError(
        f"Mixer {mixer!r} asks for a context of kind {kind!r} which {context} does not serve with the caches that it declares (it serves {SERVES}), so this model "
        "cannot generate here."
    )


def spec_of(specs: Mapping[str, MixerSpec], mixer: str, kind: str) -> MixerSpec:
    """What a mixer that calls a context's method `kind` asks for. PluginError where that is another kind."""
    spec = specs.get(mixer)
    if spec is None:
        raise PluginError(f"Mixer {mixer!r} is no module with a cache_spec(). {did_you_mean(mixer, specs)}")
    if spec.kind != kind:
        raise PluginError(f"Mixer {mixer!r} calls {kind}(), but its cache_spec() says {spec.kind!r}.")
    return spec


def state_spec(mixer: str, cache: str, spec: MixerSpec) -> CacheSpec:
    """The state of this name that a mixer declares. PluginError where there is none."""
    for each in spec.caches:
        if each.name == cache:
            return each
    names = [each.name for each in spec.caches]
    raise PluginError(
        f"Mixer {mixer!r} calls recurrent() for a state {cache!r}, which its cache_spec() does not have. {did_you_mean(cache, names)}"
    )


class Slots:
    """Which position each slot of all caches with one window holds: `positions_BT`, -1 where a slot is empty.

    Position p lies in slot p, or p modulo `limit` where a window bounds the cache: window + chunk - 1 slots, so that the first of a chunk of new tokens
    still finds its window when the last one has been written.
    """

    def __init__(self, rows: int, limit: int | None, device: torch.device):
        self.limit = limit
        self.positions_BT = torch.full((rows, 0), -1, dtype=torch.int64, device=device)
        self.index_BS = torch.zeros((rows, 0), dtype=torch.int64, device=device)
        self.used = 0

    def place(self, positions_BS: Tensor, valid_BS: Tensor, end: int) -> None:
        """Give new tokens their slots, growing as needed. `end` is the highest position plus 1; what is not valid leaves its slot empty."""
        self.used = end if self.limit is None else min(end, self.limit)
        rows, capacity = self.positions_BT.shape
        if self.used > capacity:
            wanted = max(self.used, 2 * capacity, FIRST_SLOTS)
            wanted = wanted if self.limit is None else min(wanted, self.limit)
            more = torch.full((rows, wanted - capacity), -1, dtype=torch.int64, device=self.positions_BT.device)
            self.positions_BT = torch.cat((self.positions_BT, more), 1)
        self.index_BS = positions_BS if self.limit is None else positions_BS % self.limit
        self.positions_BT.scatter_(1, self.index_BS, positions_BS.masked_fill(~valid_BS, -1))


class CacheContext:
    """A SequenceContext that keeps caches for B sequences of different lengths, each beginning at position 0. Stability: provisional.

    `begin(counts, extra)` announces new tokens, then the model is called once on them: row b has `counts[b]` tokens, padded on the right to the longest. `extra` is what the model is shown
    beside them, by the names of `Batch.extra`: `positions_3BS`, `visual_BS`, `patches_NC` and `grids`, or instead of the last two `features`, which the model's `see` gave before. Without it
    tokens go on behind the highest position so far, on all axes alike.
    `select(rows)` keeps, drops, repeats and reorders sequences. It serves softmax and latent mixers with paged caches, and recurrent ones with states, and refuses a model with others, by
    name. States are advanced by a row's own tokens alone, whatever it is padded with.

    Arguments: `chunk` is the most new tokens at once; it bounds the caches of windowed mixers.
    """

    positions_BS: Tensor
    extra: Mapping[str, Any]

    def __init__(self, model: nn.Module, rows: int, device: torch.device, chunk: int = 512):
        self.chunk, self.device = chunk, device
        self.lengths = [0] * rows
        # What positions in time, height and width are ahead of the tokens' numbers by: an image spans fewer positions than it has tokens.
        self._ahead = [0] * rows
        self.extra = {}
        self._specs = specs_of(model, type(self).__name__)
        self._slots: dict[int | None, Slots] = {}
        self._caches: dict[tuple[str, str], Tensor] = {}
        # By mixer and cache, [B, ...]; absent before the first tokens.
        self._states: dict[tuple[str, str], Tensor] = {}
        self._counts_B: Tensor | None = None
        for mixer, spec in self._specs.items():
            for cache in spec.caches if spec.kind != "recurrent" else ():
                limit = None if cache.window is None else cache.window + chunk - 1
                self._slots.setdefault(cache.window, Slots(rows, limit, device))
                self._caches[mixer, cache.name] = torch.empty((rows, 0, *cache.shape), dtype=getattr(torch, cache.dtype), device=device)
        self._fresh = False

    def begin(self, counts: Sequence[int], extra: Mapping[str, Any] | None = None) -> None:
        """`counts[b]` new tokens for sequence b (0: none) come in the next call of the model, at most `chunk`. `extra` is what they are shown with."""
        if len(counts) != len(self.lengths) or not counts or max(counts) > self.chunk or max(counts) < 1 or min(counts) < 0:
            raise PluginError(
                f"CacheContext for {len(self.lengths)} sequences and chunks of {self.chunk} was told of {list(counts)} new tokens."
            )
        width = max(counts)
        starts = torch.tensor(self.lengths, device=self.device)
        offsets_S = torch.arange(width, device=self.device)
        self.positions_BS = starts[:, None] + offsets_S
        counts_B = torch.tensor(list(counts), device=self.device)
        self._counts_B = None if min(counts) == width else counts_B
        valid_BS = offsets_S < counts_B[:, None]
        end = max(self.lengths) + width
        # Nothing was there before: plain causal attention over the new tokens, the fast path of every kernel. Padding comes last, so that no token sees it.
        self._fresh = not any(self.lengths)
        for slots in self._slots.values():
            slots.place(self.positions_BS, valid_BS, end)
        self.extra = self._shown(extra or {}, valid_BS)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if "positions_3BS" in self.extra and extra:
            highest_B = self.extra["positions_3BS"].amax(0).masked_fill(~valid_BS, -1).amax(1).tolist()
            ahead = zip(self._ahead, counts, self.lengths, highest_B, strict=True)
            self._ahead = [max(old + length - count, highest + 1) - length for old, count, length, highest in ahead]

    def _shown(self, extra: Mapping[str, Any], valid_BS: Tensor) -> Mapping[str, Any]:
        """`extra` of the new tokens, with positions where they are others than the tokens' numbers."""
        given = extra.get("positions_3BS")
        if given is not None and (given.shape != (3, *valid_BS.shape) or given.dtype != torch.int64):
            raise PluginError(
                f"CacheContext was told of {list(valid_BS.shape)} new tokens, and their positions_3BS are {given.dtype} {list(given.shape)}; they must be int64 [3, {valid_BS.shape[0]}, {valid_BS.shape[1]}]."
            )
        if given is not None or not any(self._ahead):
            return extra
        ahead_B1 = torch.tensor(self._ahead, device=self.device)[:, None]
        return {**extra, "positions_3BS": (self.positions_BS + ahead_B1).expand(3, -1, -1)}

    def select(self, rows: Sequence[int]) -> None:
        """From now on sequence i is what sequence `rows[i]` was."""
        if list(rows) == list(range(len(self.lengths))):
            return
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.device)
        self.lengths = [self.lengths[row] for row in rows]
        self._ahead = [self._ahead[row] for row in rows]
        for slots in self._slots.values():
            slots.positions_BT = slots.positions_BT.index_select(0, index)
        self._caches = {key: cache.index_select(0, index) for key, cache in self._caches.items()}
        self._states = {key: state.index_select(0, index) for key, state in self._states.items()}

    def cache_bytes(self) -> int:
        """What caches and states occupy."""
        return sum(kept.numel() * kept.element_size() for kept in (*self._caches.values(), *self._states.values()))

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
        """Causal softmax attention of the new tokens over the cached ones and themselves. Returns [B, S, H, Dv]."""
        key, value = spec_of(self._specs, mixer, "softmax").caches
        slots = self._slots[key.window]
        k_BTKD, v_BTKD = self._append(mixer, key, k_BSKD), self._append(mixer, value, v_BSKD)
        settings: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks_H": sinks_H}
        if self._fresh:
            return ops.attention(q_BSHD, k_BSKD, v_BSKD, **settings)
        positions_BT = slots.positions_BT[:, : slots.used]
        return ops.attention(
            q_BSHD,
            k_BTKD,
            v_BTKD,
            documents_q_BS=torch.zeros_like(self.positions_BS),
            documents_k_BT=positions_BT.clamp(max=0),  # 0 where there is a token, -1 in empty slots
            positions_q_BS=self.positions_BS,
            positions_k_BT=positions_BT,
            **settings,
        )

    def latent(self, mixer: str, latent_BSC: Tensor, attend: Callable[..., Tensor], **settings: Any) -> Tensor:
        """Attention over a latent: `attend` sees all that is cached, its positions, and its documents (-1: an empty slot). Where nothing was cached before, it
        sees the new tokens as they are."""
        (cache,) = spec_of(self._specs, mixer, "latent").caches
        latent_BTC = self._append(mixer, cache, latent_BSC)
        if self._fresh:
            return attend(latent_BSC, self.positions_BS, None, **settings)
        slots = self._slots[cache.window]
        positions_BT = slots.positions_BT[:, : slots.used]
        return attend(latent_BTC, positions_BT, positions_BT.clamp(max=0), **settings)

    def recurrent(self, mixer: str, cache: str, update: Callable[..., Any], *inputs: Tensor, **settings: Any) -> Tensor:
        """A recurrence goes on from each sequence's state, by its own new tokens."""
        spec = state_spec(mixer, cache, spec_of(self._specs, mixer, "recurrent"))
        outputs, after = update(*inputs, state=self._states.get((mixer, cache)), documents_BS=None, counts_B=self._counts_B, **settings)
        self._states[mixer, cache] = after.to(getattr(torch, spec.dtype))
        return outputs

    def indexed(self, mixer: str, *inputs: Tensor, **settings: Any) -> Tensor:
        """Refused."""
        refuse("indexed", mixer, type(self).__name__)

    def _append(self, mixer: str, spec: CacheSpec, new_BS: Tensor) -> Tensor:
        """Write the new tokens' entries; returns the cache's used part, a view."""
        slots, cache = self._slots[spec.window], self._caches[mixer, spec.name]
        capacity = slots.positions_BT.shape[1]
        if cache.shape[1] < capacity:
            grown = cache.new_zeros((cache.shape[0], capacity, *cache.shape[2:]))
            grown[:, : cache.shape[1]] = cache
            self._caches[mixer, spec.name] = cache = grown
        rows_B1 = torch.arange(cache.shape[0], device=self.device)[:, None]
        cache[rows_B1, slots.index_BS] = new_BS.to(cache.dtype)
        return cache[:, : slots.used]
