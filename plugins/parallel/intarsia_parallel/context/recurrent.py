"""A recurrence over a row that is cut in contiguous parts: states are passed by combination of prefixes, never by a chain of ranks.

`update` is a mixer's, as `SequenceContext.recurrent` has it. It can be served where it is associative and says so by two attributes, which are functions:

    update.carry(*inputs, documents_BS=..., **settings) -> carry      what a part does to any state that comes into it
    update.combine(earlier, later) -> carry                           what two neighbouring parts do together, one after the other

A carry is a tuple of tensors whose first dimension is B; what is not floating-point has no gradient. Its last element is the state at the part's end if the part is entered with the state of zeros, which is
the beginning; where a new document begins within the part, nothing of a state that comes in may be left. For h_t = a_t h_(t-1) + b_t a carry is (product of a_t, h
at the end from 0), and combine gives (a' a, a' h + h'). Both are differentiable, and `carry` takes parts without tokens (what it returns then is not looked at).
Every rank gathers all carries, combines those before it, and calls `update` once, with the state that comes in. The gradient of the gather is a reduce-scatter.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.errors import PluginError, UsageError
from torch import Tensor

from intarsia_parallel.collectives import gather
from intarsia_parallel.context.cut import SequenceCut
from intarsia_parallel.context.plan import Documents
from intarsia_parallel.context.transfer import connected, on_device

Carry = tuple[Tensor, ...]


def recurrent(
    mixer: str,
    update: Callable[..., Any],
    inputs: tuple[Tensor, ...],
    settings: dict[str, Any],
    cut: SequenceCut,
    documents: Documents,
    documents_BS: Tensor | None,
    comm: Communicator,
) -> Tensor:
    """`update`'s outputs for this rank's part. Raises UsageError where `update` is not associative, or parts are not contiguous."""
    carry, combine = getattr(update, "carry", None), getattr(update, "combine", None)
    if carry is None or combine is None:
        raise UsageError(
            f"Mixer {mixer!r} has a recurrence that cannot be cut along the sequence: its update has no `carry` and `combine`. Set mesh.cp=1, or "
            "give the update the two functions by which states of parts are combined (see docs: context parallelism)."
        )
    if not cut.in_order:
        raise UsageError(f"Mixer {mixer!r} has a recurrence, which needs parts in the row's order; the sequence is cut zigzag here.")
    crossing = crossings(cut, documents)
    state: Tensor | None = None
    carries: list[Carry] = []
    if any(any(rows) for rows in crossing):
        made = carry(*inputs, documents_BS=documents_BS, **settings)
        if not isinstance(made, tuple) or not made or any(x.shape[:1] != inputs[0].shape[:1] for x in made):
            raise PluginError(f"Mixer {mixer!r}: its update's `carry` must return a tuple of tensors whose first dimension is the row.")
        if not made[-1].is_floating_point():
            raise PluginError(
                f"Mixer {mixer!r}: the last of its update's `carry` is the state, of a floating-point dtype, and not {made[-1].dtype}."
            )
        carries = _gathered(made, inputs, comm)
        state = _incoming(carries, combine, cut, crossing, comm.rank)
    outputs, _ = update(*inputs, state=state, documents_BS=documents_BS, counts_B=None, **settings)
    return connected(outputs, *itertools.chain(*carries))


def crossings(cut: SequenceCut, documents: Documents) -> list[list[bool]]:
    """For each rank and row, whether the document of the part's first token began before it."""
    result = []
    for ranges in cut.ranges:
        first = ranges[0][0] if ranges else None
        result.append([first is not None and documents.begin(row, first) < first for row in range(len(documents.starts))])
    return result


def _gathered(made: Carry, inputs: tuple[Tensor, ...], comm: Communicator) -> list[Carry]:
    """Every rank's carry. What has gradients goes as one tensor: with several, the order in which their gradients come back would differ from rank to rank."""
    flowing = [x for x in made if x.is_floating_point()]
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in flowing])
    packed_N = torch.cat([x.flatten().to(dtype) for x in flowing])
    if not inputs[0].numel():
        # What no token made is reached from the inputs all the same, so that gradients of gathers come back in one order on all ranks.
        packed_N = connected(packed_N, *inputs)
    packed_RN = gather(packed_N[None], 0, [1] * comm.size, comm, "states")
    parts = [
        part.view(comm.size, *x.shape).to(x.dtype)
        for part, x in zip(packed_RN.split([x.numel() for x in flowing], 1), flowing, strict=True)
    ]
    columns = [parts.pop(0) if x.is_floating_point() else gather(x[None], 0, [1] * comm.size, comm, "states") for x in made]
    return list(zip(*(column.unbind(0) for column in columns), strict=True))


def _incoming(carries: list[Carry], combine: Callable[..., Carry], cut: SequenceCut, crossing: list[list[bool]], rank: int) -> Tensor:
    """The state with which this rank's part is entered: zeros in rows where a document begins there."""
    total: Carry | None = None
    for earlier in range(rank):
        if cut.counts[earlier]:
            entered = _cleared(total, crossing[earlier])
            total = carries[earlier] if entered is None else combine(entered, carries[earlier])
    cleared = _cleared(total, crossing[rank])
    return torch.zeros_like(carries[0][-1]) if cleared is None else cleared[-1]


def _cleared(carry: Carry | None, crosses: list[bool]) -> Carry | None:
    """What came before is nothing to a row whose part begins a document."""
    if carry is None or all(crosses):
        return carry
    keep_B = on_device(crosses, torch.bool, carry[-1].device)
    return tuple(torch.where(keep_B.view(-1, *[1] * (x.ndim - 1)), x, torch.zeros((), dtype=x.dtype, device=x.device)) for x in carry)
