"""Which runs of chunks a state goes through, longest first, found on the device: nothing waits for it. In Triton.

A run begins at a row's first chunk, at a chunk whose first token begins a document, and inside a chunk in which a document begins that is not its first (the last such): there it begins late,
with what that document writes. It ends where the next one begins. Programs take runs (times heads and blocks of values) by turns, there and back again, so that the longest go to all of them first.
"""

from __future__ import annotations

import triton
import triton.language as tl

RUN: tl.constexpr = tl.constexpr(4)
"""int32 numbers of a run: its first chunk, the one behind its last, whether it begins late (in its first chunk), and whether the next one begins in its last."""
BLOCK = 2048


@triton.jit(do_not_specialize=["total", "chunks", "classes"])
def schedule_kernel(
    borders_pointer, found_pointer, runs_pointer, count_pointer, total, chunks, classes, C: tl.constexpr, BLOCK: tl.constexpr
):
    """One program. `found` [2 total + 1] int32 is scratch, `runs` [2 total, RUN] int32, `count` [1] int32; `total` chunks of all rows, `chunks` of each; 2^classes > total."""
    count = tl.zeros([], dtype=tl.int32)
    for first in range(0, total, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        inside = chunk < total
        entering = tl.load(borders_pointer + 2 * chunk, mask=inside, other=C)
        begins = inside & ((chunk % chunks == 0) | (entering == 0))
        late = inside & (tl.load(borders_pointer + 2 * chunk + 1, mask=inside, other=0) > 0)
        both = begins.to(tl.int32) + late.to(tl.int32)
        place = count + tl.cumsum(both, axis=0) - both
        tl.store(found_pointer + place, 2 * chunk, mask=begins)
        tl.store(found_pointer + place + begins.to(tl.int32), 2 * chunk + 1, mask=late)
        count += tl.sum(both, axis=0)
    tl.store(found_pointer + count, 2 * total)
    tl.store(count_pointer, count)
    tl.debug_barrier()
    placed = tl.zeros([], dtype=tl.int32)
    for number in range(classes):
        size = 1 << (classes - 1 - number)
        for first in range(0, count, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < count
            this, following = tl.load(found_pointer + at, mask=inside, other=0), tl.load(found_pointer + at + 1, mask=inside, other=0)
            start, stop = this // 2, following // 2 + following % 2
            mine = inside & (stop - start >= size) & (stop - start < 2 * size)
            place = runs_pointer + (placed + tl.cumsum(mine.to(tl.int32), axis=0) - 1) * RUN
            tl.store(place, start, mask=mine)
            tl.store(place + 1, stop, mask=mine)
            tl.store(place + 2, this % 2, mask=mine)
            tl.store(place + 3, following % 2, mask=mine)
            placed += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def item_of(turn, program, programs):
    """Which item a program takes in its `turn`: forwards and backwards by turns."""
    return turn * programs + program + turn % 2 * (programs - 1 - 2 * program)


@triton.jit
def run_of(runs_pointer, which, chunks, DOCUMENTS: tl.constexpr):
    """First chunk, end, late, followed (within its last chunk). Without documents a row is a run."""
    if DOCUMENTS:
        run = runs_pointer + which * RUN
        start, stop, late, followed = tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 3)
    else:
        start, stop, late, followed = which * chunks, (which + 1) * chunks, which * 0, which * 0
    return start, stop, late, followed
