"""`sort_pairs` in Triton: a sort by counting, in two launches. M pairs, E experts, B programs.

The first counts each program's pairs of each expert. The second knows from all counts where its own pairs of an expert begin, and gives them their places in the order of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from intarsia_kernels.direct import cdiv, direct_op, power_of_two, wrap_triton

MOST_PROGRAMS = 128
ELEMENTS = 8192
"""Pairs times experts that a program compares at once."""
MOST_EXPERTS = 1024
MOST_PAIRS = 2**30
"""Kernels number pairs in 32 bits, and the last program's numbers go beyond the last pair."""
COUNTED = 16
"""Programs whose counts are summed at once."""


@triton.jit
def _count(experts_pointer, table_pointer, pairs, PER: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """table[b, e]: how many of the PER pairs of program b chose e."""
    program, expert = tl.program_id(0), tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, PER, CHUNK):
        pair = program * PER + start + tl.arange(0, CHUNK)
        chosen = tl.load(experts_pointer + pair, mask=pair < pairs, other=-1).to(tl.int32)
        found += tl.sum((chosen[None, :] == expert[:, None]).to(tl.int32), axis=1)
    tl.store(table_pointer + program * EXPERTS + expert, found, mask=expert < EXPERTS)


@triton.jit
def _place(
    experts_pointer, table_pointer, pairs_pointer, places_pointer, counts_pointer, bounds_pointer, pairs, PER: tl.constexpr,
    EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr, MOST_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """places[pair] and pairs[place]; the first program writes counts and bounds as well. A pair of an expert that does not exist is a dropped one, and the rows that it leaves are a tail."""
    program, programs, expert = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    total, before = tl.zeros([BLOCK], dtype=tl.int32), tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, MOST_PROGRAMS, COUNTED):
        other = start + tl.arange(0, COUNTED)
        mask = (expert < EXPERTS)[:, None] & (other < programs)[None, :]
        counts = tl.load(table_pointer + other[None, :] * EXPERTS + expert[:, None], mask=mask, other=0)
        total += tl.sum(counts, axis=1)
        before += tl.sum(tl.where((other < program)[None, :], counts, 0), axis=1)
    first, placed = tl.cumsum(total, axis=0) - total, tl.sum(total, axis=0)
    if program == 0:
        tl.store(counts_pointer + expert, total.to(tl.int64), mask=expert < EXPERTS)
        tl.store(bounds_pointer + expert, first.to(tl.int64), mask=expert < EXPERTS)
        tl.store(bounds_pointer + EXPERTS, placed.to(tl.int64))
    next_place = first + before
    for start in range(0, PER, CHUNK):
        pair = program * PER + start + tl.arange(0, CHUNK)
        chosen = tl.load(experts_pointer + pair, mask=pair < pairs, other=-1).to(tl.int32)
        is_of = (chosen[None, :] == expert[:, None]).to(tl.int32)
        # The place of a pair if it is of the expert: after those of the same expert before it.
        place = tl.sum(is_of * (tl.cumsum(is_of, axis=1) - 1 + next_place[:, None]), axis=0)
        exists, known = pair < pairs, (chosen >= 0) & (chosen < EXPERTS)
        tl.store(places_pointer + pair, tl.where(known, place, -1).to(tl.int64), mask=exists)
        tl.store(pairs_pointer + place, pair.to(tl.int64), mask=exists & known)
        tl.store(pairs_pointer + pair, tl.full([CHUNK], -1, dtype=tl.int64), mask=exists & (pair >= placed))
        next_place += tl.sum(is_of, axis=1)


@direct_op("intarsia::sort_pairs")
def _sort_pairs(experts_NK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pairs, block = experts_NK.numel(), power_of_two(experts)
    chunk = max(16, ELEMENTS // block)
    # Constants of kernels, which are compiled for few numbers of pairs.
    per = chunk * power_of_two(cdiv(pairs, MOST_PROGRAMS * chunk))
    programs = cdiv(pairs, per)
    pairs_M, places_NK = experts_NK.new_empty(pairs), torch.empty_like(experts_NK)
    counts_E, bounds_E1 = experts_NK.new_empty(experts), experts_NK.new_empty(experts + 1)
    table_BE = torch.empty(programs, experts, dtype=torch.int32, device=experts_NK.device)
    shared = {"PER": per, "EXPERTS": experts, "CHUNK": chunk, "BLOCK": block}
    wrap_triton(_count)[(programs,)](experts_NK, table_BE, pairs, **shared)
    wrap_triton(_place)[(programs,)](
        experts_NK,
        table_BE,
        pairs_M,
        places_NK,
        counts_E,
        bounds_E1,
        pairs,
        **shared,
        COUNTED=COUNTED,
        MOST_PROGRAMS=MOST_PROGRAMS,
        num_warps=8,
    )
    return pairs_M, places_NK, counts_E, bounds_E1


def sort_pairs(experts_NK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the operator `sort_pairs`, bit for bit. A pair of an expert that does not exist has no place (-1), and the rows that are left serve no pair (-1)."""
    return _sort_pairs(experts_NK.contiguous(), experts)


def supports(experts_NK: Tensor, experts: int) -> str | None:
    """Why a call cannot be taken."""
    if experts_NK.dtype != torch.int64 or experts_NK.numel() > MOST_PAIRS:
        return f"{experts_NK.numel()} numbers in {experts_NK.dtype}"
    if experts > MOST_EXPERTS:
        return f"{experts} experts"
    return "no pairs" if not experts_NK.numel() else None


sort_pairs.supports = supports  # type: ignore[attr-defined]
