"""Who sees whose keys: whole numbers, worked out on the host from the lengths of documents, the same on every rank.

Indices count along a row. Query i sees key j when both lie in one document and 0 <= i - j (< window), so that what a query sees is one range of keys that
ends at itself, and what a range of queries sees is one range as well.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools

from intarsia_parallel.context.cut import Ranges, SequenceCut, intersected, length, merged


@dataclasses.dataclass(frozen=True)
class Documents:
    """Where the documents of each row begin. `starts[b]` ascends from 0 and ends with the row's length."""

    starts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, lengths: tuple[tuple[int, ...], ...]) -> Documents:
        """From the lengths of documents (an empty document is none)."""
        return cls(tuple((0, *itertools.accumulate(n for n in row if n)) for row in lengths))

    @property
    def single(self) -> bool:
        """Whether no row has more than one."""
        return all(len(row) <= 2 for row in self.starts)

    def begin(self, row: int, index: int) -> int:
        """Where the document of this index begins."""
        starts = self.starts[row]
        return starts[bisect.bisect_right(starts, index) - 1]

    def first_seen(self, index: int, window: int | None) -> int:
        """The earliest key that query `index` sees in any row."""
        first = min((self.begin(row, index) for row in range(len(self.starts))), default=index)
        return first if window is None else max(first, index - window + 1)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Queries of one document over keys of the same, local numbers: queries [query, query + queries), keys [key, key + keys) of row `row`.

    `lead` is how far the last query stands behind the last key (0: they are one token). Within the segment, query a sees key b when
    0 <= (a - queries) - (b - keys) + lead (< window); every query sees a key. Three sorts occur: all is seen; lead is 0; all keys lie before all queries, which
    are fewer, and the window ends among them.
    """

    row: int
    query: int
    queries: int
    key: int
    keys: int
    lead: int

    def is_full(self, window: int | None) -> bool:
        """Whether every query sees every key."""
        return self.lead >= self.queries - 1 and (window is None or self.lead + self.keys - 1 < window)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What attention over a cut sequence needs to know, for one window.

    `needs[r]` are the keys that rank r's queries see; `transfers[s][r]` those among them that rank s holds.
    """

    cut: SequenceCut
    documents: Documents
    window: int | None

    @functools.cached_property
    def needs(self) -> tuple[Ranges, ...]:
        """By rank."""
        seen = self.documents.first_seen
        return tuple(merged([(seen(start, self.window), stop) for start, stop in ranges]) for ranges in self.cut.ranges)

    @functools.cached_property
    def transfers(self) -> tuple[tuple[Ranges, ...], ...]:
        """By the rank that holds keys, then by the rank that sees them; a rank's own part is all that it holds."""
        ranks = range(self.cut.ranks)
        return tuple(tuple(self.cut.ranges[s] if s == r else intersected(self.cut.ranges[s], self.needs[r]) for r in ranks) for s in ranks)

    @functools.cached_property
    def shifts(self) -> tuple[int, ...]:
        """The steps of a ring in which something travels: in step n rank r has keys of rank r - n."""
        ranks = self.cut.ranks
        return tuple(n for n in range(1, ranks) if any(self.transfers[(r - n) % ranks][r] for r in range(ranks)))

    def segments(self, rank: int, keys: Ranges) -> list[Segment]:
        """Rank `rank`'s queries over a block that holds these keys one after the other."""
        result: list[Segment] = []
        query = 0
        for q0, q1 in self.cut.ranges[rank]:
            key = 0
            for k0, k1 in keys:
                if k0 < q1:
                    result += self._pairs(q0, q1, k0, k1, query - q0, key - k0)
                key += k1 - k0
            query += q1 - q0
        return result

    def _pairs(self, q0: int, q1: int, k0: int, k1: int, query: int, key: int) -> list[Segment]:
        """Segments of queries [q0, q1) and keys [k0, k1); `query` and `key` turn indices into local numbers."""
        result = []
        for row, starts in enumerate(self.documents.starts):
            at = bisect.bisect_right(starts, q0) - 1
            for d0, d1 in itertools.pairwise(starts[at:]):
                if d0 >= q1:
                    break
                qa, qb = max(q0, d0), min(q1, d1)
                ka, kb = max(k0, d0), min(k1, qb)
                if self.window is not None:
                    ka = max(ka, qa - self.window + 1)
                    qb = min(qb, kb - 1 + self.window)
                if ka >= kb:
                    continue
                # Queries whose window holds all the keys, and those whose window ends among them: these are fewer than the keys.
                middle = qb if self.window is None or k1 > q0 else max(qa, min(qb, ka + self.window))
                result += [Segment(row, a + query, b - a, ka + key, kb - ka, b - kb) for a, b in ((qa, middle), (middle, qb)) if a < b]
        return result


def pieces(held: Ranges, wanted: Ranges) -> Ranges:
    """Where, among tokens held one range after the other, the wanted ones lie (each of them within one held range)."""
    result, offset = [], 0
    for start, stop in held:
        result += [(max(a, start) - start + offset, min(b, stop) - start + offset) for a, b in wanted if a < stop and b > start]
        offset += stop - start
    return merged(result)


def received(plan: Plan, rank: int) -> list[int]:
    """How many keys come from each rank, the own ones among them."""
    return [length(plan.transfers[source][rank]) for source in range(plan.cut.ranks)]
