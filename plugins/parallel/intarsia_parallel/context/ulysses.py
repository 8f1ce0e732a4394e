"""Softmax attention by heads: one all-to-all gives each rank all tokens of some heads, another brings the results back (arXiv 2309.14509).

Rank r has query heads [r H/cp, (r + 1) H/cp) and the key/value heads that they read: those are sent to several ranks where there are fewer than ranks. Between
the exchanges attention is that of one device, over whole rows, by whatever kernel is in force.
"""

from __future__ import annotations

import torch
from intarsia import ops
from intarsia.comm import Communicator
from intarsia.errors import UsageError
from torch import Tensor

from intarsia_parallel.collectives import exchange
from intarsia_parallel.context.block import Settings
from intarsia_parallel.context.cut import SequenceCut
from intarsia_parallel.context.rows import Rows


def obstacle(heads: int, ranks: int) -> str | None:
    """Why heads cannot be shared out, with the nearest numbers that could."""
    if heads % ranks == 0:
        return None
    legal = [n for n in range(1, heads + 1) if heads % n == 0]
    lower, higher = max(n for n in legal if n < ranks), min((n for n in legal if n > ranks), default=None)
    nearest = f"cp {lower}" if higher is None else f"cp {lower} or {higher}"
    return f"{heads} query heads cannot be shared out over cp {ranks}; nearest: {nearest}"


def read_by(rank: int, heads: int, kv_heads: int, ranks: int) -> list[int]:
    """The key/value heads of a rank's query heads: once each where every one is read by equally many, else one for each query head."""
    own = heads // ranks
    read = [head // (heads // kv_heads) for head in range(rank * own, (rank + 1) * own)]
    distinct = sorted(set(read))
    return distinct if all(read.count(head) * len(distinct) == own for head in distinct) else read


def ulysses(
    mixer: str, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, sinks_H: Tensor | None, settings: Settings, rows: Rows, comm: Communicator
) -> Tensor:
    """[B, S, H, Dv] of this rank's queries over the whole row, in the queries' dtype. Raises UsageError where heads do not divide."""
    ranks, heads, kv_heads = comm.size, q_BSHD.shape[2], k_BSKD.shape[2]
    problem = obstacle(heads, ranks)
    if problem is not None:
        raise UsageError(
            f"Mixer {mixer!r}: context parallelism by heads (ulysses): {problem}; or choose parallel=declared with parallel.context=ring or gather."
        )
    own = heads // ranks
    read = [read_by(rank, heads, kv_heads, ranks) for rank in range(ranks)]
    by_rank = []
    for rank in range(ranks):
        q = q_BSHD[:, :, rank * own : (rank + 1) * own]
        by_rank.append([q, _heads(k_BSKD, read[rank]), _heads(v_BSKD, read[rank])])
    q, k, v = _to_heads(by_rank, rows.cut, comm)
    sinks = None if sinks_H is None else sinks_H[comm.rank * own : (comm.rank + 1) * own]
    y_BTHD = ops.attention(
        q,
        k,
        v,
        scale=settings.scale,
        window=settings.window,
        softcap=settings.softcap,
        sinks_H=sinks,
        documents_q_BS=rows.documents_BT,
        documents_k_BT=rows.documents_BT,
        packing=rows.packing,
    )
    return _to_tokens(y_BTHD, rows.cut, comm)


def _heads(x_BSKD: Tensor, which: list[int]) -> Tensor:
    """Those heads, by slices: an index on the device would be a copy that the host waits for."""
    if which == list(range(which[0], which[0] + len(which))):
        return x_BSKD.narrow(2, which[0], len(which))
    return torch.stack([x_BSKD.select(2, head) for head in which], 2)


def _to_heads(by_rank: list[list[Tensor]], cut: SequenceCut, comm: Communicator) -> list[Tensor]:
    """From [B, S, heads for a rank, D] by rank to [B, T, own heads, D]."""
    own = by_rank[comm.rank]
    flat = torch.cat([tensor.reshape(-1) for tensors in by_rank for tensor in tensors])
    sends = [sum(tensor.numel() for tensor in tensors) for tensors in by_rank]
    shapes = [[(x.shape[0], count, *x.shape[2:]) for x in own] for count in cut.counts]
    receives = [sum(torch.Size(shape).numel() for shape in each) for each in shapes]
    arrived = exchange(flat, sends, receives, comm, "ulysses").split(receives)
    parts = [
        [piece.view(shape) for piece, shape in zip(part.split([torch.Size(s).numel() for s in each]), each, strict=True)]
        for part, each in zip(arrived, shapes, strict=True)
    ]
    return [cut.join([part[i] for part in parts], 1) for i in range(len(own))]


def _to_tokens(y_BTHD: Tensor, cut: SequenceCut, comm: Communicator) -> Tensor:
    """From [B, T, own heads, D] to [B, S, H, D]."""
    parts = [cut.take(y_BTHD, rank, 1).reshape(-1) for rank in range(comm.size)]
    rows, heads, dim = y_BTHD.shape[0], y_BTHD.shape[2], y_BTHD.shape[3]
    shape = (rows, cut.counts[comm.rank], heads, dim)
    count = torch.Size(shape).numel()
    arrived = exchange(torch.cat(parts), [part.numel() for part in parts], [count] * comm.size, comm, "ulysses")
    return torch.cat([part.view(shape) for part in arrived.split([count] * comm.size)], 2)
