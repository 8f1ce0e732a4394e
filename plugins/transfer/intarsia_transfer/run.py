"""Carrying out transfers: everything that any of them moves, in one exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from intarsia.comm import Communicator
from intarsia.errors import PluginError, UsageError
from torch import Tensor

from intarsia_transfer.plan import Move, Transfer

Job = tuple[Transfer, Tensor, Tensor]


@torch.no_grad()
def run_transfers(comm: Communicator, jobs: Sequence[Job], what: str = "transfer") -> None:
    """Do all `jobs`, (plan, source, destination) each, in one exchange that is counted under `what`. A collective: the same plans on every rank.

    `comm`'s rank r is rank r of the plans' layouts. `source` and `destination` are this rank's local parts: 1-D, contiguous, in storage order, without
    common memory, with no elements on a rank that holds nothing. Data travels in the source's dtype, which is the same on every rank, and is
    reduced in the destination's, contributions in rank order: every destination gets the same bits. Raises UsageError for a plan of more ranks
    than `comm` has, and PluginError for tensors that do not fit their plan. Stability: provisional.
    """
    moves = [_checked(comm, *job) for job in jobs]
    packed: list[list[Tensor]] = [[] for _ in range(comm.size)]
    expected = [0] * comm.size
    for (sends, receives), (_, source, _) in zip(moves, jobs, strict=True):
        for move in sends:
            if move.destination != comm.rank:
                packed[move.destination].append(move.source_view(source).reshape(-1).contiguous().view(torch.uint8))
        for move in receives:
            if move.source != comm.rank:
                expected[move.source] += move.box.numel * source.element_size()
    nothing = torch.empty(0, dtype=torch.uint8, device=jobs[0][1].device) if jobs else torch.empty(0, dtype=torch.uint8)
    arrived = comm.exchange([torch.cat(parts) if parts else nothing for parts in packed], expected, what)
    offsets = [0] * comm.size
    for (_, receives), (_, source, destination) in zip(moves, jobs, strict=True):
        for move in receives:
            target = move.destination_view(destination)
            if move.op == "zero":
                target.zero_()
                continue
            values = move.source_view(source) if move.source == comm.rank else _unpacked(arrived[move.source], offsets, move, source.dtype)
            if move.op == "copy":
                target.copy_(values)
            elif move.op == "sum":
                target.add_(values)
            else:
                torch.maximum(target, values.to(target.dtype), out=target)


def _unpacked(arrived: Tensor, offsets: list[int], move: Move, dtype: torch.dtype) -> Tensor:
    begin, length = offsets[move.source], move.box.numel * dtype.itemsize
    offsets[move.source] += length
    part = arrived[begin : begin + length]
    # Parts of other dtypes before it, and other ranks' before those, may leave it where its dtype cannot begin.
    aligned = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
    return aligned.view(dtype).view(move.box.size)


def _checked(comm: Communicator, plan: Transfer, source: Tensor, destination: Tensor) -> tuple[list[Move], list[Move]]:
    """The moves from and to this rank."""
    if plan.ranks > comm.size:
        raise UsageError(f"A transfer between {plan.ranks} ranks cannot be run in group {comm.name!r} of {comm.size}.")
    for name, layout, tensor in (("source", plan.src, source), ("destination", plan.dst, destination)):
        numel = layout.numel(comm.rank) if comm.rank < layout.ranks else 0
        if tensor.dim() != 1 or tensor.numel() != numel or not tensor.is_contiguous():
            raise PluginError(
                f"The {name} of a transfer of shape {plan.src.shape} on rank {comm.rank} of group {comm.name!r} has shape {tuple(tensor.shape)}; "
                f"its layout says {numel} elements, 1-D and contiguous."
            )
    return plan.moves(comm.rank)
