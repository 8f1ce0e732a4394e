"""Who computes which tokens in the next step, and in which blocks they are kept. Torch-free.

Every step each request that is being continued computes one token; what is left of `budget` goes to prompts, in pieces. Order is that of priority, then of arrival: nobody who came later is
served more. Where blocks run out the last in this order gives up its own and waits; what it had is computed again, so that its result is the same.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable

from intarsia_generation.engine.blocks import BlockPool, name_of, root
from intarsia_generation.engine.request import Job


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of a request, to be computed now. `decode`: it is one token of a request that was running before."""

    job: Job
    start: int
    end: int
    decode: bool

    @property
    def row(self) -> int:
        """The request's place among those that run."""
        return self.job.row

    @property
    def blocks(self) -> list[int]:
        """The request's blocks: one and the same list from when it begins until it gives them up."""
        return self.job.blocks

    @property
    def tokens(self) -> list[int]:
        """The tokens themselves."""
        return self.job.tokens[self.start : self.end]


class Scheduler:
    """Requests that run and that wait.

    Arguments: `budget` is the most tokens of a step, more than `sequences`, the most requests that run. `on_put_back` is told of a request before it loses its blocks.
    """

    def __init__(
        self, pool: BlockPool, sequences: int, budget: int, prefix_cache: bool, on_put_back: Callable[[Job], None] | None = None
    ) -> None:
        self.pool, self.sequences, self.budget, self.prefix_cache = pool, sequences, budget, prefix_cache
        self._on_put_back = on_put_back
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.preemptions = 0
        self._free_rows = list(range(sequences - 1, -1, -1))
        self._root = root(-1)

    def set_version(self, version: int) -> None:
        """New weights: nothing that is kept is worth anything, and what runs is computed anew, in the order that it had."""
        for job in list(self.running):
            self.put_back(job)
        self.pool.forget()
        self._root = root(version)

    def add(self, job: Job) -> None:
        """A request waits."""
        bisect.insort(self.waiting, job, key=lambda each: each.order)

    def remove(self, job: Job) -> None:
        """A request has ended, or is not wanted any more."""
        if job in self.running:
            self.running.remove(job)
            self._give_up(job)
        elif job in self.waiting:
            self.waiting.remove(job)

    def put_back(self, job: Job) -> None:
        """A running request waits again, without its caches."""
        if self._on_put_back is not None:
            self._on_put_back(job)
        self.running.remove(job)
        self._give_up(job)
        self.add(job)

    @property
    def begun(self) -> bool:
        """Whether a request has begun and not ended, with blocks or, at the moment, without."""
        return bool(self.running) or any(job.begun for job in self.waiting)

    def plan(self, admit: bool = True) -> list[Chunk]:
        """The next step; empty where nothing can be computed. Blocks are given to all of it. `admit`: requests may begin; those that had begun and lost their blocks always go on."""
        chunks: list[Chunk] = []
        left, preempted = self.budget, self.preemptions
        missing = [(job, job.needed - job.computed) for job in self.running]
        for job, size in [*(each for each in missing if each[1] == 1), *(each for each in missing if each[1] > 1)]:
            size = min(size, left)
            # A request that lost its blocks to one before it in this very plan is no longer among those that run.
            if size > 0 and job.row >= 0 and self._make_room(job, job.computed + size):
                chunks.append(self._chunk(job, size, size == 1))
                left -= size
        for chunk in chunks:
            self._name(chunk.job)
        for job in [] if preempted < self.preemptions else [each for each in self.waiting if admit or each.begun]:
            if left == 0 or len(self.running) == self.sequences or not self._begin(job):
                break
            size = min(job.needed - job.computed, left)
            chunks.append(self._chunk(job, size, False))
            self._name(job)
            left -= size
        return chunks

    # ------------------------------------------------------------ blocks

    def _begin(self, job: Job) -> bool:
        """Give a waiting request a row and blocks for all that is known of it, those of others where they hold the same; False where there are too few."""
        shared = list(self._same(job))
        wanted = -(-job.needed // self.pool.size) - len(shared)
        if wanted > self.pool.available - sum(self.pool.is_free(block) for block, _ in shared):
            return False
        self.waiting.remove(job)
        bisect.insort(self.running, job, key=lambda each: each.order)
        job.row = self._free_rows.pop()
        for block, name in shared:
            self.pool.share(block)
            job.blocks.append(block)
            job.names.append(name)
        job.computed = len(shared) * self.pool.size
        if job.cached_tokens is None:
            job.cached_tokens = min(job.computed, job.prompt)
        for _ in range(wanted):
            job.blocks.append(self._taken())
        return True

    def _same(self, job: Job) -> Iterable[tuple[int, bytes]]:
        """Full blocks of others that hold what this request begins with. The token before the first undecided one has to be computed: from it the next is chosen."""
        size, parent = self.pool.size, self._root
        for start in range(0, (job.decided - 1) // size * size if self.prefix_cache else 0, size):
            parent = name_of(parent, job.tokens[start : start + size], job.shown(start, start + size))
            block = self.pool.find(parent)
            if block is None:
                return
            yield block, parent

    def _make_room(self, job: Job, end: int) -> bool:
        """Blocks for the first `end` tokens, where needed those of the last request in order; False where that is the request itself.

        Prompts were given theirs when they began, so that this is for requests that are continued; they are planned in order, and the last has no part in the plan yet.
        """
        while len(job.blocks) * self.pool.size < end:
            block = self.pool.take()
            if block is not None:
                job.blocks.append(block)
                continue
            last = self.running[-1]
            self.preemptions += 1
            self.put_back(last)
            if last is job:
                return False
        return True

    def _taken(self) -> int:
        block = self.pool.take()
        assert block is not None, "more blocks were counted than there are"
        return block

    def _chunk(self, job: Job, size: int, decode: bool) -> Chunk:
        start = job.computed
        job.computed += size
        return Chunk(job, start, job.computed, decode)

    def _name(self, job: Job) -> None:
        """Name the blocks that the planned step fills. Requests that begin in the same step may read them already, since all entries are written before any is read."""
        size = self.pool.size
        for number in range(len(job.names), job.computed // size if self.prefix_cache else 0):
            parent = job.names[-1] if job.names else self._root
            start, end = number * size, (number + 1) * size
            job.names.append(name_of(parent, job.tokens[start:end], job.shown(start, end)))
            self.pool.name(job.blocks[number], job.names[-1])

    def _give_up(self, job: Job) -> None:
        self.pool.release(job.blocks)
        self._free_rows.append(job.row)
        job.blocks, job.names, job.computed, job.row = [], [], 0, -1
