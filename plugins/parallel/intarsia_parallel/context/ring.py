"""Softmax attention with the keys and values passing by: in step n a rank has those of the rank n places before it.

What is seen of a block travels from its owner straight to where it is seen, so that a step in which no rank sees anything does not take place, and a sliding
window moves its halo only. While one block is computed the next is on its way: besides its own, a rank holds two blocks, whatever the number of ranks. Backward
brings the blocks again, computes their scores again, and sends each block's gradients to its owner, who adds them in the order of the steps.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from intarsia.comm import Communicator
from torch import Tensor

from intarsia_parallel.context.block import Block, Merged, Result, Settings, wide
from intarsia_parallel.context.cut import Ranges, length
from intarsia_parallel.context.plan import Plan, pieces
from intarsia_parallel.context.transfer import Transfer, packed, unpacked, width


class Course:
    """One rank's steps for one plan, prepared once for a batch."""

    def __init__(self, plan: Plan, comm: Communicator) -> None:
        self.plan, self.comm, self.rank = plan, comm, comm.rank
        self.shifts = plan.shifts

    @functools.cached_property
    def own(self) -> Block:
        """Over the keys that this rank holds."""
        return Block(self.plan.segments(self.rank, self.plan.cut.ranges[self.rank]))

    @functools.cached_property
    def gathered(self) -> Block:
        """Over all keys that this rank's queries see, in the row's order."""
        return Block(self.plan.segments(self.rank, self.plan.needs[self.rank]))

    def passing(self, shift: int) -> Block:
        """Over the keys that arrive in step `shift`."""
        return self._passing[shift]

    @functools.cached_property
    def _passing(self) -> dict[int, Block]:
        return {shift: Block(self.plan.segments(self.rank, self.arrives(shift))) for shift in self.shifts}

    def source(self, shift: int) -> int:
        """Whose keys arrive in step `shift`."""
        return (self.rank - shift) % self.comm.size

    def reader(self, shift: int) -> int:
        """Who gets this rank's."""
        return (self.rank + shift) % self.comm.size

    def arrives(self, shift: int) -> Ranges:
        """Which keys arrive in step `shift`."""
        return self.plan.transfers[self.source(shift)][self.rank]

    def leaves(self, shift: int) -> Ranges:
        """Which of the own keys leave in step `shift`, as local numbers."""
        return pieces(self.plan.cut.ranges[self.rank], self.plan.transfers[self.rank][self.reader(shift)])

    def bring(self, shift: int, k: Tensor, v: Tensor) -> Transfer:
        """Begin to bring step `shift`'s keys and values."""
        flat, count = packed((k, v), self.leaves(shift)), length(self.arrives(shift)) * width((k, v))
        return self._between(self.reader(shift), flat, self.source(shift), count, "ring")

    def send_back(self, shift: int, dk: Tensor, dv: Tensor) -> Transfer:
        """Begin to send their gradients to their owner, and to get those of the own ones."""
        flat, count = torch.cat((dk.reshape(-1), dv.reshape(-1))), length(self.leaves(shift)) * width((dk, dv))
        return self._between(self.source(shift), flat, self.reader(shift), count, "ring, backward")

    def _between(self, to: int, flat: Tensor, source: int, count: int, what: str) -> Transfer:
        nothing = flat.new_empty(0)
        ranks = range(self.comm.size)
        return Transfer(
            self.comm, [flat if rank == to else nothing for rank in ranks], [count if rank == source else 0 for rank in ranks], what
        )


def ring(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, sinks_H: Tensor | None, settings: Settings, course: Course) -> Tensor:
    """[B, S, H, Dv] of this rank's queries over the whole row, in the queries' dtype."""
    return _Ring.apply(q_BSHD, k_BSKD, v_BSKD, sinks_H, settings, course, course.own, course.shifts)


def over_gathered(q_BSHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, sinks_H: Tensor | None, settings: Settings, course: Course) -> Tensor:
    """The same where `k_BTKD` and `v_BTKD` are all that this rank's queries see (`gather.collect`). No communication."""
    return _Ring.apply(q_BSHD, k_BTKD, v_BTKD, sinks_H, settings, course, course.gathered, ())


class _Ring(torch.autograd.Function):
    """Keys that are here, then those that pass by."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor | None,
        settings: Settings,
        course: Course,
        here: Block,
        shifts: tuple[int, ...],
    ) -> Tensor:
        merged = Merged(q, v.shape[-1])
        coming = course.bring(shifts[0], k, v) if shifts else None
        here.forward(q, k, v, settings, merged)
        for shift, following in itertools.zip_longest(shifts, shifts[1:]):
            assert coming is not None
            k_there, v_there = unpacked(coming.wait()[course.source(shift)], (k, v), length(course.arrives(shift)))
            coming = None if following is None else course.bring(following, k, v)
            course.passing(shift).forward(q, k_there, v_there, settings, merged)
        out, lse = merged.out, merged.lse
        if sinks_H is not None:
            # One more key, whose value is 0.
            all_lse = torch.logaddexp(lse, sinks_H.to(lse.dtype))
            out.mul_((lse - all_lse).exp()[..., None])
            lse = all_lse
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks_H, out, lse)
        ctx.settings, ctx.course, ctx.here, ctx.shifts = settings, course, here, shifts
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, sinks_H, out, lse = ctx.saved_tensors
        settings, course, shifts = ctx.settings, ctx.course, ctx.shifts
        result = Result(out, lse, grads[0])
        dq = q.new_zeros(q.shape, dtype=wide(q.dtype))
        coming = course.bring(shifts[0], k, v) if shifts else None
        dk, dv = ctx.here.backward(q, k, v, settings, result, dq)
        going: tuple[int, Transfer] | None = None
        for shift, following in itertools.zip_longest(shifts, shifts[1:]):
            assert coming is not None
            k_there, v_there = unpacked(coming.wait()[course.source(shift)], (k, v), length(course.arrives(shift)))
            coming = None if following is None else course.bring(following, k, v)
            block = course.passing(shift).backward(q, k_there, v_there, settings, result, dq)
            if going is not None:
                _add_arrived(course, going, dk, dv)
            going = shift, course.send_back(shift, block[0].to(k.dtype), block[1].to(v.dtype))
        if going is not None:
            _add_arrived(course, going, dk, dv)
        dsinks = None
        if sinks_H is not None:
            dsinks = -((sinks_H.to(lse.dtype) - lse).exp() * result.delta).sum((0, 1)).to(sinks_H.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None


def _add_arrived(course: Course, going: tuple[int, Transfer], dk: Tensor, dv: Tensor) -> None:
    """Add what the readers of step `shift` found for the own keys and values."""
    shift, transfer = going
    ranges = course.leaves(shift)
    parts = unpacked(transfer.wait()[course.reader(shift)], (dk, dv), length(ranges))
    for total, part in zip((dk, dv), parts, strict=True):
        at = 0
        for start, stop in ranges:
            total[:, start:stop] += part[:, at : at + stop - start]
            at += stop - start
