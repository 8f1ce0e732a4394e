"""Keys and values (or latents) from everywhere at once: an all-gather of what is seen, whose backward is the reduce-scatter that belongs to it.

A rank gets the tokens that its queries see and no others: under a causal mask some three quarters of a row, with a sliding window its halo.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intarsia_parallel.context.block import Settings, wide
from intarsia_parallel.context.cut import length
from intarsia_parallel.context.plan import pieces, received
from intarsia_parallel.context.ring import Course, over_gathered
from intarsia_parallel.context.transfer import Transfer, packed_for_all, unpacked, width


def gather(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, sinks_H: Tensor | None, settings: Settings, course: Course) -> Tensor:
    """[B, S, H, Dv] of this rank's queries over the whole row, in the queries' dtype."""
    k_BTKD, v_BTKD = collect(course, k_BSKD, v_BSKD)
    return over_gathered(q_BSHD, k_BTKD, v_BTKD, sinks_H, settings, course)


def collect(course: Course, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors [B, S, ...] of one dtype as [B, T, ...]: all tokens that this rank's queries see, in the row's order. Backward: every token's gradients, summed in
    rank order."""
    return tuple(_Collect.apply(course, *tensors))


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, course: Course, *tensors: Tensor) -> tuple[Tensor, ...]:
        plan, rank = course.plan, course.rank
        held = plan.cut.ranges[rank]
        sends = packed_for_all(tensors, [pieces(held, wanted) for wanted in plan.transfers[rank]], rank)
        counts = [0 if source == rank else count * width(tensors) for source, count in enumerate(received(plan, rank))]
        arrived = Transfer(course.comm, sends, counts, "gather").wait()
        ctx.course, ctx.dtypes = course, [tensor.dtype for tensor in tensors]
        parts = [list(tensors) if s == rank else unpacked(arrived[s], tensors, n) for s, n in enumerate(received(plan, rank))]
        # A tensor that a function returns must not be one that it was given.
        return tuple(torch.cat([part[i].narrow(1, a, b - a) for part, a, b in _order(course, parts)], 1) for i in range(len(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        course: Course = ctx.course
        plan, rank = course.plan, course.rank
        places = [pieces(plan.needs[rank], plan.transfers[source][rank]) for source in range(course.comm.size)]
        sends = packed_for_all(grads, places, rank)
        counts = [0 if to == rank else length(wanted) * width(grads) for to, wanted in enumerate(plan.transfers[rank])]
        arrived = Transfer(course.comm, sends, counts, "gather, backward").wait()
        totals = [grad.new_zeros(grad.shape[0], plan.cut.counts[rank], *grad.shape[2:], dtype=wide(grad.dtype)) for grad in grads]
        for source in range(course.comm.size):
            wanted = pieces(plan.cut.ranges[rank], plan.transfers[rank][source])
            whole = places[rank] if source == rank else ((0, length(wanted)),)
            parts = list(grads) if source == rank else unpacked(arrived[source], grads, length(wanted))
            for total, part in zip(totals, parts, strict=True):
                _add(total, wanted, part, whole)
        return None, *(total.to(dtype) for total, dtype in zip(totals, ctx.dtypes, strict=True))


def _order(course: Course, parts: list[list[Tensor]]) -> list[tuple[list[Tensor], int, int]]:
    """(tensors, start, stop) of the pieces of all parts in the row's order."""
    found = []
    for source, part in enumerate(parts):
        at = 0
        for start, stop in course.plan.transfers[source][course.rank]:
            found.append((start, part, at, at + stop - start))
            at += stop - start
    found.sort(key=lambda each: each[0])
    return [each[1:] for each in found] or [(parts[course.rank], 0, 0)]


def _add(total: Tensor, at: tuple[tuple[int, int], ...], part: Tensor, places: tuple[tuple[int, int], ...]) -> None:
    """Add tokens `places` of `part` to tokens `at` of `total`, in order."""
    taken = torch.cat([part[:, a:b] for a, b in places], 1) if len(places) > 1 else part[:, places[0][0] : places[0][1]] if places else part
    offset = 0
    for start, stop in at:
        total[:, start:stop] += taken[:, offset : offset + stop - start]
        offset += stop - start
