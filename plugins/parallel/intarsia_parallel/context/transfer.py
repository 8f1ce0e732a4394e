"""Parts of the sequence from rank to rank, beside the computation where the device has streams."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from intarsia.comm import Communicator
from torch import Tensor

from intarsia_parallel.context.cut import Ranges, length, slices


@functools.lru_cache(maxsize=16)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Transfer:
    """An all-to-all that has begun: `sends[r]` (1-D, contiguous) goes to rank r. On CUDA it runs on a side stream until `wait`, which waits for this one and
    for none that began later; elsewhere it is over when this returns. All ranks of the group begin their transfers in the same order."""

    def __init__(self, comm: Communicator, sends: Sequence[Tensor], receive_counts: Sequence[int], what: str) -> None:
        self._arrived: torch.cuda.Event | None = None
        if not sends[0].is_cuda:
            self._received = comm.exchange(sends, receive_counts, what)
            return
        stream = _side_stream(sends[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._received = comm.exchange(sends, receive_counts, what)
            self._arrived = stream.record_event()
        for tensor in sends:
            tensor.record_stream(stream)

    def wait(self) -> list[Tensor]:
        """What each rank sent here."""
        if self._arrived is not None:
            current = torch.cuda.current_stream()
            current.wait_event(self._arrived)
            for tensor in self._received:
                tensor.record_stream(current)
        return self._received


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers as a tensor on the device. The host goes on at once: a copy from memory that is not pinned would wait for all that the device has still to do."""
    x = torch.tensor(values, dtype=dtype, device="cpu")
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def packed(tensors: Sequence[Tensor], ranges: Ranges) -> Tensor:
    """Tokens within ranges of dimension 1 of tensors [B, S, ...] of one dtype, one tensor after the other: 1-D."""
    parts = [slices(tensor, ranges, 1).reshape(-1) for tensor in tensors]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def unpacked(flat: Tensor, likes: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """What `packed` made, as tensors [B, tokens, ...] shaped like `likes` otherwise."""
    shapes = [(like.shape[0], tokens, *like.shape[2:]) for like in likes]
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def width(tensors: Sequence[Tensor]) -> int:
    """Elements of one token of all rows of these tensors."""
    return sum(tensor.shape[0] * torch.Size(tensor.shape[2:]).numel() for tensor in tensors)


def packed_for_all(tensors: Sequence[Tensor], wanted: Sequence[Ranges], rank: int) -> list[Tensor]:
    """By destination, nothing for `rank` itself."""
    nothing = tensors[0].new_empty(0)
    return [nothing if to == rank or not length(ranges) else packed(tensors, ranges) for to, ranges in enumerate(wanted)]


def connected(x: Tensor, *received: Tensor) -> Tensor:
    """`x`, whose backward reaches `received` as well: where `x` has no element (a rank without tokens) nothing else would, and the other ranks would wait."""
    return _Connected.apply(x, *received)


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *received: Tensor) -> Tensor:
        ctx.shapes = [(each.shape, each.dtype) for each in received]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(grads[0].new_zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)
