"""The model's side of the paged caches.

Softmax attention reads them where they lie, by the operator `paged_attention`: one call for all requests that go on, whatever their lengths. Prompts that begin, all of one length, attend to themselves alone and
read no cache. Latents are gathered first, in every layer: a copy of all entries that a step sees, by `index_select`. In the plain form keys and values of all entries are made anew, and the copy is the smaller part of it; the
absorbed form (one key head whose values are its first columns) could read a cache by blocks as well, but its heads are wider than what kernels take.

A call is announced in one of two ways. `begin` takes what the host knows of requests: anything, in shapes that follow from it. `begin_single` takes one token of each of a fixed number of sequences and knows what is on the device
alone, so that a CUDA graph can hold it (`static`). The device's tables lag behind the host's: `show` brings up what changed otherwise than by the step's own tokens.

A rank of a generator that is cut has its own heads and the same tables: nothing changes.

Shape suffixes: B rows of a call, S new tokens of a row, N all new tokens in a line, R sequences that are computed alike, T entries of a sequence, W blocks of a sequence, H query heads, K key/value
heads, D head dim, C width of a latent.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from intarsia import ops
from intarsia.contracts import CacheSpec, MixerSpec
from torch import Tensor, nn

from intarsia_generation import cache as caching
from intarsia_generation.cache import refuse, spec_of, state_spec
from intarsia_generation.paged import Paged, paged_attention


class Piece(Protocol):
    """What this side sees of a `Chunk`: tokens `start` to `end` of the request in place `row`, whose `blocks` are one list from when it begins until it gives them up."""

    @property
    def row(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def decode(self) -> bool: ...
    @property
    def blocks(self) -> list[int]: ...
    @property
    def tokens(self) -> Sequence[int]: ...


NAME = "PagedContext of the generator `local`"
IN_A_LINE = {"positions_3N": "positions_3BS", "visual_N": "visual_BS"}
"""What is given of tokens in a line, and how the model asks for it."""


def specs_of(model: nn.Module) -> dict[str, MixerSpec]:
    """The mixers of a model and what they ask for. UsageError, naming kind and mixer, for what this generator does not serve."""
    return caching.specs_of(model, NAME)


def block_bytes(specs: dict[str, MixerSpec], size: int) -> int:
    """What one block of all paged caches occupies."""
    return size * _entry_bytes(specs, "paged")


def state_bytes(specs: dict[str, MixerSpec]) -> int:
    """What all states of one sequence occupy."""
    return _entry_bytes(specs, "state")


def _entry_bytes(specs: dict[str, MixerSpec], storage: str) -> int:
    caches = [cache for spec in specs.values() for cache in spec.caches if cache.storage == storage]
    return sum(getattr(torch, cache.dtype).itemsize * torch.Size(cache.shape).numel() for cache in caches)


@dataclasses.dataclass
class Group:
    """Sequences with equally many new tokens: R sequences of S tokens, `first` to `last` of the line.

    `rows_R` are their places among all sequences. `tables_RW` are their blocks, None where nothing was there before: then the new tokens are all that they see, and states begin. `kept` holds, by window, which blocks are read and the positions of what is in them.
    """

    sequences: int
    tokens: int
    first: int
    last: int
    positions_RS: Tensor
    rows_R: Tensor
    tables_RW: Tensor | None
    kept: dict[int | None, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)


class PagedContext:
    """A SequenceContext over caches in blocks. Stability: provisional.

    `begin(chunks)` announces new tokens and gives them in the arrangement in which the model is called on them, once: continued requests as rows of one token (with `line` one behind the other,
    too), prompts one behind the other in one row. Nothing is padded. New entries are written before any is read, so that a sequence may read blocks that another one fills in the same call. Entries are handed to
    attention in the order of their positions (entry t has position t), with what lies behind a sequence's end, which causality hides.

    Arguments: `count` blocks of `size` tokens (and two that belong to nobody: block 0, which holds zeros, and the last one, `scratch`, into which rows of a static step write that are no request's), tables for `sequences` of at
    most `longest` tokens (and for one that is nobody's, in the place `nobody`). `narrow`: of a cache with a window only blocks are read that
    hold some of it; otherwise all, so that entry t lies at t whatever the window.

    Recurrent mixers have a state for each of `sequences`. A sequence that begins at token 0 begins with no state, whatever was kept in its place before.
    """

    positions_BS: Tensor
    attention: Callable[..., Tensor] | None
    extra: Mapping[str, Any]

    def __init__(
        self,
        specs: dict[str, MixerSpec],
        device: torch.device,
        *,
        count: int,
        size: int,
        sequences: int,
        longest: int,
        narrow: bool = True,
        line: bool = False,
    ) -> None:
        self.device, self.size, self.narrow, self.line = device, size, narrow, line
        self._specs = specs
        # Taken when a mixer first writes: what predicts further ahead than the next token does not run here.
        self._caches: dict[tuple[str, str], Tensor] = {}
        self._states: dict[tuple[str, str], Tensor] = {}
        self.scratch, self.nobody = count + 1, sequences
        self._tables = torch.zeros((sequences + 1, -(-longest // size)), dtype=torch.int32)
        self._tables[self.nobody] = self.scratch
        self._filled = [0] * sequences
        self._owners: list[Any] = [None] * sequences
        # The same on the device, as far as it was shown: of each sequence the number of blocks, less than 0 where the table is another's.
        self._device_tables: Tensor | None = None
        self._shown = [-1] * sequences
        self._groups: list[Group] = []
        self._where: Paged | None = None
        self.slots_N = torch.zeros(0, dtype=torch.int64, device=device)
        self.attention = None
        self.extra = {}

    @property
    def has_softmax(self) -> bool:
        """Whether some mixer attends over keys and values in blocks."""
        return any(spec.kind == "softmax" for spec in self._specs.values())

    def kept(self) -> tuple[Tensor, ...]:
        """All caches and states."""
        return *self._caches.values(), *self._states.values()

    def clear(self) -> None:
        """Zeros everywhere: numbers that are not finite would spoil sums even where their weight is 0. On a GPU in place, since graphs hold the addresses."""
        if self.device.type == "cpu":
            self._caches.clear()
            self._states.clear()
        for kept in self.kept():
            kept.zero_()

    # ------------------------------------------------------------ announcing tokens

    def begin(self, chunks: Sequence[Piece], extra: Mapping[str, Any] | None = None) -> Tensor:
        """Tokens [B, S] for the model, of chunks that are all `decode` or none is. They lie in the order of `chunks`, which `arrangement` gives. `extra` is what the model is shown beside them: of tokens in
        a line `positions_3N` and `visual_N`, and `features` (`sight.extra_of`)."""
        in_rows = chunks[0].decode and not self.line
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size = self.size
        for chunk in chunks:
            self._update_table(chunk)
            tokens += chunk.tokens
            places, blocks = range(chunk.start, chunk.end), chunk.blocks
            positions += places
            slots += [blocks[place // size] * size + place % size for place in places]
        line_3N = torch.tensor([tokens, positions, slots], dtype=torch.int64).to(self.device)
        tokens_N, positions_N, self.slots_N = line_3N.unbind()
        self._place(chunks, positions_N)
        self.positions_BS = positions_N[:, None] if in_rows else positions_N[None]
        (first, *others) = self._groups
        # Where rows of the call are not rows of the groups, latents are handed out in a line and this context knows who sees what.
        is_plain = in_rows or (not others and first.sequences == 1)
        self.attention = None if is_plain else self._attention_over_line
        self.extra = {} if extra is None else self._arranged(extra, in_rows)
        return tokens_N[:, None] if in_rows else tokens_N[None]

    def begin_single(
        self, tokens_N: Tensor, positions_N: Tensor, rows_N: Tensor, blocks_N: Tensor, extra: Mapping[str, Any] | None = None
    ) -> Tensor:
        """As `begin`, of one new token of each of the sequences in places `rows_N`, which `show` was told of; `blocks_N` are the blocks that the tokens go into. All int64 on the device; `nobody` may come several
        times, at position 0 of `scratch`. Nothing waits for the device, and shapes follow from N alone. Returns [N, 1]."""
        tables = self._tables_there()
        tables.index_put_((rows_N, positions_N // self.size), blocks_N.to(tables.dtype))
        tables_RW = tables.index_select(0, rows_N)
        self.slots_N = blocks_N * self.size + positions_N % self.size
        count = tokens_N.shape[0]
        firsts_R = torch.arange(count, dtype=torch.int32, device=self.device)
        self._where = Paged(tables_RW, firsts_R, torch.ones_like(firsts_R), positions_N.int(), 1, self.size, narrow=self.narrow)
        self._groups = [Group(count, 1, 0, count, positions_N[:, None], rows_N, tables_RW)]
        self.positions_BS, self.attention = positions_N[:, None], None
        self.extra = {} if extra is None else self._arranged(extra, True)
        return tokens_N[:, None]

    def show(self, pieces: Sequence[Piece]) -> None:
        """Before `begin_single`: let the device's tables have all blocks of these but those of their new tokens, which are one for each."""
        late = []
        for piece in pieces:
            self._update_table(piece)
            row, number = piece.row, piece.start // self.size
            if self._shown[row] < number:
                late.append(row)
                self._shown[row] = self._filled[row]
            elif self._shown[row] == number:
                self._shown[row] += 1
        if late:
            rows_R = torch.tensor(late, dtype=torch.int64)
            self._tables_there().index_copy_(0, rows_R.to(self.device), self._tables[rows_R].to(self.device))

    def _tables_there(self) -> Tensor:
        if self._device_tables is None:
            self._device_tables = self._tables.to(self.device, copy=True)
        return self._device_tables

    @staticmethod
    def _arranged(extra: Mapping[str, Any], in_rows: bool) -> Mapping[str, Any]:
        """What is given of tokens in a line, as they lie in the call."""
        dim = -1 if in_rows else -2
        return {IN_A_LINE.get(name, name): value.unsqueeze(dim) if name in IN_A_LINE else value for name, value in extra.items()}

    def _update_table(self, chunk: Piece) -> None:
        blocks, row = chunk.blocks, chunk.row
        if self._owners[row] is not blocks:  # another request, or the same one with blocks of its second life
            self._owners[row], self._filled[row], self._shown[row] = blocks, 0, -1
            self._tables[row] = 0
        filled = self._filled[row]
        if filled < len(blocks):
            self._tables[row, filled : len(blocks)] = torch.tensor(blocks[filled:], dtype=torch.int32)
            self._filled[row] = len(blocks)

    def _place(self, chunks: Sequence[Piece], positions_N: Tensor) -> None:
        """Groups, and where softmax attention finds all entries."""
        rows = [chunk.row for chunk in chunks]
        counts, starts = [chunk.end - chunk.start for chunk in chunks], [chunk.start for chunk in chunks]
        firsts = list(itertools.accumulate(counts, initial=0))
        width = max(-(-chunk.end // self.size) for chunk in chunks)
        # Behind a row's own blocks stands block 0, which holds zeros, at positions that causality hides.
        tables_RW = self._tables[torch.tensor(rows), :width].to(self.device)
        rows_R, firsts_R, counts_R, starts_R = torch.tensor([rows, firsts[:-1], counts, starts], dtype=torch.int32).to(self.device).unbind()
        rows_R, number = rows_R.long(), 0
        self._groups = []
        for (is_fresh, size), alike in itertools.groupby(chunks, arrangement):
            members = list(alike)
            at = slice(number, number + len(members))
            first, last, number = firsts[at.start], firsts[at.stop], at.stop
            wide = max(-(-chunk.end // self.size) for chunk in members)
            own_RW = None if is_fresh else tables_RW[at, :wide]
            self._groups.append(Group(len(members), size, first, last, positions_N[first:last].view(-1, size), rows_R[at], own_RW))
        self._where = Paged(tables_RW, firsts_R, counts_R, starts_R, max(counts), self.size, counts, starts, self.narrow)

    # ------------------------------------------------------------ what mixers call

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
        keys, values = self._written(mixer, key, k_BSKD), self._written(mixer, value, v_BSKD)
        settings: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks_H": sinks_H}
        (first, *others) = self._groups
        if first.tables_RW is None and not others:
            q, k, v = (x.flatten(0, 1).unflatten(0, (first.sequences, first.tokens)) for x in (q_BSHD, k_BSKD, v_BSKD))
            y_NHD = ops.attention(q, k, v, **settings).flatten(0, 1)
        else:
            y_NHD = paged_attention(q_BSHD.flatten(0, 1), keys, values, self._where, **settings)
        return y_NHD.unflatten(0, q_BSHD.shape[:2])

    def latent(self, mixer: str, latent_BSC: Tensor, attend: Callable[..., Tensor], **settings: Any) -> Tensor:
        """Attention over a latent: `attend` sees all that is cached, with its positions. Where nothing was cached before, it sees the new tokens as they are. Prompts of several
        requests come in one row: then `attend` sees the entries of all, and this context's `attention` knows whose are whose."""
        (spec,) = spec_of(self._specs, mixer, "latent").caches
        cache = self._written(mixer, spec, latent_BSC)
        (first, *_) = self._groups
        if self.attention is None:
            if first.tables_RW is None:
                return attend(latent_BSC, self.positions_BS, None, **settings)
            latent_RTC, positions_RT = self._read(cache, first, spec.window)
            return attend(latent_RTC, positions_RT, None, **settings)
        parts, positions = [], []
        new_NC = latent_BSC.flatten(0, 1)
        for group in self._groups:
            if group.tables_RW is None:
                parts.append(new_NC[group.first : group.last])
                positions.append(group.positions_RS.flatten())
            else:
                latent_RTC, positions_RT = self._read(cache, group, spec.window)
                parts.append(latent_RTC.flatten(0, 1))
                positions.append(positions_RT.expand(group.sequences, -1).flatten())
        self.attention = functools.partial(self._attention_over_line, counts=[part.shape[0] for part in parts], window=spec.window)
        return attend(_joined(parts)[None], _joined(positions)[None], None, **settings)

    def recurrent(self, mixer: str, cache: str, update: Callable[..., Any], *inputs: Tensor, **settings: Any) -> Tensor:
        """A recurrence goes on from each sequence's state, by its own new tokens."""
        spec = state_spec(mixer, cache, spec_of(self._specs, mixer, "recurrent"))
        lines = [x.flatten(0, 1) for x in inputs]
        out = []
        for group in self._groups:
            some = [x[group.first : group.last].unflatten(0, (group.sequences, group.tokens)) for x in lines]
            kept = self._states.get((mixer, cache))
            if kept is None:
                kept = _zeros((self.nobody + 1, *spec.shape), getattr(torch, spec.dtype), self.device)
                self._states[mixer, cache] = kept
            state = None if group.tables_RW is None else kept.index_select(0, group.rows_R)
            y, after = update(*some, state=state, documents_BS=None, counts_B=None, **settings)
            kept.index_copy_(0, group.rows_R, after.to(kept.dtype))
            out.append(y.flatten(0, 1))
        return _joined(out).unflatten(0, inputs[0].shape[:2])

    def indexed(self, mixer: str, *inputs: Tensor, **settings: Any) -> Tensor:
        """Refused."""
        refuse("indexed", mixer, NAME)

    # ------------------------------------------------------------ caches

    def _attention_over_line(
        self,
        q_BSHD: Tensor,
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        *,
        scale: float,
        counts: Sequence[int] = (),
        window: int | None = None,
    ) -> Tensor:
        """Each group's queries over its own entries; everything lies in one line, B = 1."""
        out = []
        parts = zip(self._groups, k_BTKD[0].split(list(counts)), v_BTKD[0].split(list(counts)), strict=True)
        for group, keys, values in parts:
            q, k, v = (x.unflatten(0, (group.sequences, -1)) for x in (q_BSHD[0, group.first : group.last], keys, values))
            if group.tables_RW is None:
                y = ops.attention(q, k, v, scale=scale, window=window)
            else:
                _, positions_RT = self._blocks_of(group, window)
                y = ops.attention(q, k, v, scale=scale, window=window, positions_q_BS=group.positions_RS, positions_k_BT=positions_RT)
            out.append(y.flatten(0, 1))
        return _joined(out)[None]

    def _written(self, mixer: str, spec: CacheSpec, new_BS: Tensor) -> Tensor:
        """The cache, with the new tokens' entries."""
        cache = self._caches.get((mixer, spec.name))
        if cache is None:
            cache = _zeros((self.scratch + 1, self.size, *spec.shape), getattr(torch, spec.dtype), self.device)
            self._caches[mixer, spec.name] = cache
        cache.flatten(0, 1).index_copy_(0, self.slots_N, new_BS.flatten(0, 1).to(cache.dtype))
        return cache

    def _read(self, cache: Tensor, group: Group, window: int | None) -> tuple[Tensor, Tensor]:
        """A group's entries [R, T, ...] and their positions [R or 1, T]."""
        blocks_RW, positions_RT = self._blocks_of(group, window)
        entries = cache.index_select(0, blocks_RW.flatten())
        return entries.unflatten(0, blocks_RW.shape).flatten(1, 2), positions_RT

    def _blocks_of(self, group: Group, window: int | None) -> tuple[Tensor, Tensor]:
        """Blocks to read, [R, W], and the positions of their entries, [R or 1, T]."""
        if window not in group.kept:
            assert group.tables_RW is not None, "nothing was cached before these tokens"
            width = group.tables_RW.shape[1]
            offsets_T = torch.arange(self.size, device=self.device)
            seen = width if window is None else (window + group.tokens - 2) // self.size + 2
            if self.narrow and seen < width:
                first_R1 = (group.positions_RS[:, :1] - window + 1).clamp(min=0) // self.size  # type: ignore[operator]
                numbers_RW = first_R1 + torch.arange(seen, device=self.device)
                blocks_RW = group.tables_RW.gather(1, numbers_RW.clamp(max=width - 1))
            else:
                numbers_RW, blocks_RW = torch.arange(width, device=self.device)[None], group.tables_RW
            group.kept[window] = blocks_RW, (numbers_RW[..., None] * self.size + offsets_T).flatten(1)
        return group.kept[window]


def arrangement(chunk: Piece) -> tuple[bool, int]:
    """By what chunks are sorted and grouped: whether nothing was there before, and how many tokens are new."""
    return chunk.start == 0, chunk.end - chunk.start


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU memory is the system's until something is written, so that a cache costs what is used of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(torch.Size(shape).numel() * dtype.itemsize, np.uint8)).view(dtype).view(shape)
