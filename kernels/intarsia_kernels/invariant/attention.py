"""`attention` in tiles of 16 queries and 32 keys at absolute positions in the document. Shape suffixes as in `intarsia.ops`.

n tiles, b blocks, G = H / K query heads of a key/value head, R = 16 G rows of a tile, k = 32 keys of a block.

A query goes through its document's blocks in ascending order with an online softmax in float32 (float64 for that dtype):

    m' = max(m, max s);  a = exp(m - m');  total = a total + sum exp(s - m');  o = a o + exp(s - m') v

A block of which it sees nothing changes no bit (a = 1, the sums are 0), and each product has one shape whatever the call, so that a query's result is the same packed, padded, decoded, in chunks,
alone and in a batch. Backward goes through the same tiles and repeats exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from intarsia.ops import Packing
from torch import Tensor

from intarsia_kernels.invariant.masks import LastMasks
from intarsia_kernels.invariant.places import KEYS, QUERIES, Places, places


def attention(
    q_BSHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    documents_q_BS: Tensor | None = None,
    documents_k_BT: Tensor | None = None,
    positions_q_BS: Tensor | None = None,
    positions_k_BT: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """As `intarsia.ops.attention`. Raises UsageError where two keys, or two queries, of a document have one position."""
    where = _places(q_BSHD, k_BTKD, documents_q_BS, documents_k_BT, positions_q_BS, positions_k_BT, packing)
    return _Attention.apply(q_BSHD, k_BTKD, v_BTKD, sinks_H, scale, window, softcap, where)


_last: LastMasks[Places] = LastMasks()


def _places(q_BSHD: Tensor, k_BTKD: Tensor, *rest: Any) -> Places:
    *masks, packing = rest
    sizes = (q_BSHD.shape[0], q_BSHD.shape[1], k_BTKD.shape[1], q_BSHD.device)
    if packing is None or masks[2] is not None or masks[3] is not None:
        return _last.get(sizes, tuple(masks), lambda: places(*sizes, *masks))
    kept = packing.prepared
    if ("tiled", *sizes) not in kept:
        kept["tiled", *sizes] = places(*sizes, *masks)
    return kept["tiled", *sizes]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSHD: Tensor,
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        sinks_H: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        where: Places,
    ) -> Tensor:
        tiles = _Tiles(q_BSHD, k_BTKD, v_BTKD, sinks_H, scale, window, softcap, where)
        out_nKRD, lse_nKR = tiles.attend()
        ctx.save_for_backward(q_BSHD, k_BTKD, v_BTKD, sinks_H, out_nKRD, lse_nKR)
        ctx.settings = (scale, window, softcap, where)
        return tiles.to_rows(out_nKRD, (*q_BSHD.shape[:3], v_BTKD.shape[-1]), q_BSHD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BSHD, k_BTKD, v_BTKD, sinks_H, out_nKRD, lse_nKR = ctx.saved_tensors
        tiles = _Tiles(q_BSHD, k_BTKD, v_BTKD, sinks_H, *ctx.settings)
        grad_q, grad_k, grad_v, grad_sinks = tiles.gradients(grads[0], out_nKRD, lse_nKR)
        return (
            tiles.to_rows(grad_q, q_BSHD.shape, q_BSHD.dtype),
            tiles.to_keys(grad_k, k_BTKD),
            tiles.to_keys(grad_v, v_BTKD),
            grad_sinks if sinks_H is None else grad_sinks.to(sinks_H.dtype),
            *(None,) * 4,
        )


class _Tiles:
    """The operands of one call, in tiles."""

    def __init__(
        self,
        q_BSHD: Tensor,
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        sinks_H: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
        where: Places,
    ) -> None:
        self.dtype = torch.float64 if q_BSHD.dtype == torch.float64 else torch.float32
        self.scale, self.window, self.softcap, self.where = scale, window, softcap, where
        self.kv_heads, self.groups = k_BTKD.shape[2], q_BSHD.shape[2] // k_BTKD.shape[2]
        self.q_nKRD = self.from_rows(q_BSHD).mul_(scale)
        self.k_bKkD, self.v_bKkD = self._from_keys(k_BTKD), self._from_keys(v_BTKD)
        self.sinks_KR: Tensor | None = None
        if sinks_H is not None:
            self.sinks_KR = sinks_H.to(self.dtype).view(self.kv_heads, -1, 1).expand(-1, -1, QUERIES).flatten(1)

    def from_rows(self, x_BSHD: Tensor) -> Tensor:
        """Queries, or what belongs to them, in tiles: [n, K, R, D]; zeros where a tile has no query."""
        tiles = len(self.where.numbers)
        x_PHD = x_BSHD.flatten(0, 1).index_select(0, self.where.query_from).to(self.dtype)
        lines = x_PHD.new_zeros(tiles * QUERIES, *x_PHD.shape[1:]).index_copy_(0, self.where.query_to, x_PHD)
        return lines.view(tiles, QUERIES, self.kv_heads, self.groups, x_PHD.shape[-1]).permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous()

    def to_rows(self, x_nKRD: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Back: [B, S, H, D]; zeros for queries that have no tile."""
        lines = x_nKRD.unflatten(2, (self.groups, QUERIES)).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        out = torch.zeros(shape, dtype=dtype, device=x_nKRD.device)
        out.view(-1, *shape[2:]).index_copy_(0, self.where.query_from, lines.index_select(0, self.where.query_to).to(dtype))
        return out

    def _from_keys(self, x_BTKD: Tensor) -> Tensor:
        """Keys or values in blocks: [b + 1, K, 32, D]."""
        where = self.where
        lines = x_BTKD.new_zeros((where.blocks + 1) * KEYS, *x_BTKD.shape[2:], dtype=self.dtype)
        lines.index_copy_(0, where.key_to, x_BTKD.flatten(0, 1).index_select(0, where.key_from).to(self.dtype))
        return lines.view(-1, KEYS, *x_BTKD.shape[2:]).transpose(1, 2).contiguous()

    def to_keys(self, x_bKkD: Tensor, like_BTKD: Tensor) -> Tensor:
        """Back: [B, T, K, D]; zeros for keys that nobody sees."""
        lines = x_bKkD.transpose(1, 2).flatten(0, 1)
        out = torch.zeros_like(like_BTKD, memory_format=torch.contiguous_format)
        out.view(-1, *like_BTKD.shape[2:]).index_copy_(0, self.where.key_from, lines.index_select(0, self.where.key_to).to(out.dtype))
        return out

    def _scores(self, block: int, start: int, end: int, stands: Tensor) -> tuple[Tensor, Tensor | None]:
        """Masked scores [tiles, K, R, 32] of tiles `start` to `end` by their segments' block of this number, and tanh where there is a softcap."""
        s = torch.matmul(self.q_nKRD[start:end], self.k_bKkD.index_select(0, stands).transpose(2, 3))
        tanh = None
        if self.softcap is not None:
            tanh = torch.tanh(s / self.softcap)
            s = self.softcap * tanh
        # Tiles that see all of a block need no mask. Numbers descend: those on the diagonal come last.
        first = start
        if self.window is None and not self.where.holes:
            first = max(start, self.where.range_of(block + 1, None)[1])
        if first < end:
            seen = self.where.seen(block, first, end, stands[first - start :], self.window)
            s[first - start :].unflatten(2, (self.groups, QUERIES)).masked_fill_(~seen[:, None, None], -torch.inf)
        return s, tanh

    def attend(self) -> tuple[Tensor, Tensor]:
        """The result [n, K, R, Dv] and the logarithm of the sum of exponentials [n, K, R] (0 where nothing is seen)."""
        shape = self.q_nKRD.shape[:3]
        m, total = self.q_nKRD.new_full(shape, torch.finfo(self.dtype).min), self.q_nKRD.new_zeros(shape)
        o = self.q_nKRD.new_zeros(*shape, self.v_bKkD.shape[-1])
        for block in range(self.where.longest()):
            start, end = self.where.range_of(block, self.window)
            if start >= end:
                continue
            stands = self.where.block_of(block, start, end)
            s, _ = self._scores(block, start, end, stands)
            largest = torch.maximum(m[start:end], s.amax(-1))
            p = s.sub_(largest[..., None]).exp_()
            kept = (m[start:end] - largest).exp_()
            total[start:end].mul_(kept).add_(p.sum(-1))
            o[start:end].mul_(kept[..., None]).add_(torch.matmul(p, self.v_bKkD.index_select(0, stands)))
            m[start:end] = largest
        if self.sinks_KR is not None:
            largest = torch.maximum(m, self.sinks_KR)
            kept = (m - largest).exp_()
            total, o, m = total * kept + (self.sinks_KR - largest).exp(), o * kept[..., None], largest
        nothing = total == 0
        total = total.masked_fill(nothing, 1.0)
        return o / total[..., None], (m + total.log()).masked_fill_(nothing, 0.0)

    def gradients(self, grad_BSHD: Tensor, out_nKRD: Tensor, lse_nKR: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """By queries [n, K, R, D], keys and values [b + 1, K, 32, D], and sinks [H] or None."""
        grad_o = self.from_rows(grad_BSHD)
        delta = (grad_o * out_nKRD).sum(-1)
        grad_q, grad_k, grad_v = torch.zeros_like(self.q_nKRD), torch.zeros_like(self.k_bKkD), torch.zeros_like(self.v_bKkD)
        for block in range(self.where.longest()):
            start, end = self.where.range_of(block, self.window)
            if start >= end:
                continue
            stands = self.where.block_of(block, start, end)
            s, tanh = self._scores(block, start, end, stands)
            p = s.sub_(lse_nKR[start:end, ..., None]).exp_()
            grad_v.index_add_(0, stands, torch.matmul(p.transpose(2, 3), grad_o[start:end]))
            grad_p = torch.matmul(grad_o[start:end], self.v_bKkD.index_select(0, stands).transpose(2, 3))
            grad_s = grad_p.sub_(delta[start:end, ..., None]).mul_(p)
            if tanh is not None:
                grad_s.mul_(1 - tanh.square())
            grad_q[start:end] += torch.matmul(grad_s, self.k_bKkD.index_select(0, stands))
            grad_k.index_add_(0, stands, torch.matmul(grad_s.transpose(2, 3), self.q_nKRD[start:end]))
        grad_sinks = None
        if self.sinks_KR is not None:
            share = (self.sinks_KR - lse_nKR).exp()
            grad_sinks = -(share * delta).sum(0).unflatten(1, (self.groups, QUERIES)).sum(-1).flatten()
        return grad_q.mul_(self.scale), grad_k, grad_v, grad_sinks
