"""Which tokens a sample is made of: index arithmetic, pure functions of seed, data and settings.

A stream is one source in sample order. With `concatenate` it is its documents, shuffled anew in each epoch, one after the other, cut into rows of
S tokens, so rows run across the end of an epoch and nothing is skipped or seen twice. The rows that lie whole in an epoch are shuffled
once more: else a batch would be consecutive rows of one long document. With `one_per_row` sample n is document n, cut to S. A mixture says of each global sample which stream it is from and its number there.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import numpy
from intarsia.errors import UsageError

from intarsia_data.store import TokenStore

ONE, KEYS = 1 << 32, (1 << 64) - 1
VERSION = 2
"""Of the arithmetic here. It goes up whenever a sample's number comes to mean other tokens, so that no older position is taken up."""
ROUNDS = 4


def mix(values: numpy.ndarray, key: int) -> numpy.ndarray:
    """A 64-bit hash (splitmix64) of each value under `key`. Our own, so that an order never depends on the version of a library."""
    with numpy.errstate(over="ignore"):
        x = values.astype(numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15) + numpy.uint64(key)
        x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return x ^ (x >> numpy.uint64(31))


def scatter(index: int, count: int, key: int) -> int:
    """Where a permutation of 0 to `count` - 1 puts `index`, without a table: Feistel rounds on as many bits as it takes, until the place is one of them."""
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (int(mix(numpy.array(right), (key + number) & KEYS)) & mask)
        index = left << half | right
        if index < count:
            return index


def key_of(*parts: object) -> int:
    """A 64-bit key from anything that prints exactly."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def split(lengths: numpy.ndarray, held_out: float, name: str) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Numbers of the documents to train on and of those held out: the `held_out` share with the smallest hashes of their number, at least one.

    Arguments: `lengths` are the documents' tokens; documents without tokens are in neither. Errors: UsageError when either side would be empty.
    """
    documents = numpy.flatnonzero(lengths)
    if not len(documents):
        raise UsageError(f"{name}: the data set is empty: {len(lengths)} documents, none with any text.")
    if not held_out:
        return documents, documents[:0]
    count = max(1, round(held_out * len(documents)))
    if count >= len(documents):
        raise UsageError(
            f"{name}: data.held_out={held_out} of {len(documents)} document{'s' * (len(documents) > 1)} leaves {len(documents) - count} to train on. Set data.held_out=0 "
            "(and name sources in data.evaluation if you want evaluation), or cut the data into more documents (text sources: separator)."
        )
    ranked = documents[numpy.argsort(mix(documents, key_of("held out")), kind="stable")]
    return numpy.sort(ranked[count:]), numpy.sort(ranked[:count])


@dataclasses.dataclass(frozen=True, slots=True)
class Segments:
    """The parts of documents that one row is made of: for each the first token's place in the store, its length, and its document's number."""

    begin: numpy.ndarray
    length: numpy.ndarray
    document: numpy.ndarray


class Stream:
    """One source in sample order. `samples` is how many there are in `epochs` epochs, None where epochs is None; `cut_tokens` what the last one lacks."""

    def __init__(self, store: TokenStore, documents: numpy.ndarray, *, row: int, packing: str, key: int | None, epochs: int | None):
        self.store, self._documents, self._row, self._key, self._epochs = store, documents, row, key, epochs
        self._one_per_row = packing == "one_per_row"
        lengths = numpy.diff(store.offsets)[documents]
        self.lengths = numpy.minimum(lengths, row) if self._one_per_row else lengths
        self.tokens = int(self.lengths.sum())
        self.tokens_per_sample = self.tokens / len(documents) if self._one_per_row else float(row)
        per_run = None if epochs is None else epochs * (len(documents) if self._one_per_row else self.tokens)
        self.samples = None if per_run is None else per_run if self._one_per_row else -(-per_run // row)
        self.cut_tokens = 0 if per_run is None or self._one_per_row else -per_run % row
        self._order = functools.lru_cache(maxsize=3)(self._make_order)

    def _make_order(self, epoch: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Document numbers of an epoch in order, and where in the epoch's tokens each ends."""
        if self._key is None:
            return self._documents, numpy.cumsum(self.lengths)
        order = numpy.argsort(mix(self._documents, key_of(self._key, epoch)), kind="stable")
        return self._documents[order], numpy.cumsum(self.lengths[order])

    def segments(self, sample: int) -> Segments:
        """What sample `sample` is made of; fewer than a row's tokens only for a short document of its own or at the end of the last epoch."""
        if self._one_per_row:
            epoch, number = divmod(sample, len(self._documents))
            document = self._order(epoch)[0][number : number + 1]
            offset = self.store.offsets[document]
            return Segments(offset, numpy.minimum(self.store.offsets[document + 1] - offset, self._row), document)
        position, parts = self._cut(sample) * self._row, []
        left = self._row if self._epochs is None else min(self._row, self._epochs * self.tokens - position)
        while left > 0:
            epoch, offset = divmod(position, self.tokens)
            taken = min(left, self.tokens - offset)
            parts.append(self._part(epoch, offset, offset + taken))
            position, left = position + taken, left - taken
        return Segments(*(numpy.concatenate(columns) for columns in zip(*((p.begin, p.length, p.document) for p in parts), strict=True)))

    def _cut(self, sample: int) -> int:
        """Which row, as they were cut, sample `sample` is. One that lies in two epochs, or is the last and short, keeps its place."""
        epoch = sample * self._row // self.tokens
        first, end = -(-epoch * self.tokens // self._row), (epoch + 1) * self.tokens // self._row
        if self._key is None or sample >= end:
            return sample
        return first + scatter(sample - first, end - first, key_of(self._key, epoch, "rows"))

    def _part(self, epoch: int, start: int, stop: int) -> Segments:
        """Tokens `start` to `stop` of an epoch, cut at the documents' borders. O(log documents)."""
        order, ends = self._order(epoch)
        first, last = numpy.searchsorted(ends, (start, stop - 1), side="right")
        document, end = order[first : last + 1], ends[first : last + 1]
        offset = numpy.concatenate([[ends[first - 1] if first else 0], end[:-1]])
        begin = numpy.maximum(offset, start)
        return Segments(self.store.offsets[document] + (begin - offset), numpy.minimum(end, stop) - begin, document)

    def consumed(self, samples: int) -> tuple[float, float]:
        """Tokens in the first `samples` samples (within an epoch of one_per_row: on average), and how many epochs that is."""
        tokens = samples * self.tokens_per_sample
        if self._epochs is not None:
            tokens = min(tokens, self._epochs * self.tokens)
        return tokens, tokens / self.tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A span of the mixture with the same streams: its first sample, how many samples each stream gave before, those that still give, their fractions."""

    start: int
    given: tuple[int, ...]
    active: tuple[int, ...]
    fractions: tuple[int, ...]


class Mixture:
    """Interleaves streams so that after any number of samples each stream's share is within about one sample of its rate.

    `rates` are shares of samples; `sizes` how many samples each stream has, None: endless. A stream that is used up leaves, and the others share
    among themselves, until all are used up. `total` is the number of samples in all, None: endless.
    """

    def __init__(self, rates: Sequence[float], sizes: Sequence[int | None]):
        self._phases: list[Phase] = []
        start, given, active = 0, [0] * len(rates), list(range(len(rates)))
        while active:
            # The k-th stream takes its fraction of what the streams before it leave.
            sums = [sum(rates[stream] for stream in active[number:]) for number in range(len(active))]
            fractions = tuple(
                min(max(1, round(rates[stream] / rest * ONE)), ONE - 1) for stream, rest in zip(active[:-1], sums, strict=False)
            )
            self._phases.append(Phase(start, tuple(given), tuple(active), fractions))
            left = [(place, sizes[stream], given[stream]) for place, stream in enumerate(active)]
            lengths = [_first_with(fractions, place, size - before) for place, size, before in left if size is not None]
            if not lengths:
                self.total: int | None = None
                return
            for stream, count in zip(active, _share(fractions, min(lengths)), strict=True):
                given[stream] += count
            start += min(lengths)
            active = [stream for stream in active if given[stream] != sizes[stream]]
        self.total = start

    def _phase(self, sample: int) -> Phase:
        return self._phases[bisect.bisect_right(self._phases, sample, key=lambda phase: phase.start) - 1]

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` samples each stream gives."""
        phase = self._phase(samples)
        counts = list(phase.given)
        for stream, count in zip(phase.active, _share(phase.fractions, samples - phase.start), strict=True):
            counts[stream] += count
        return counts

    def locate(self, sample: int) -> tuple[int, int]:
        """The stream of sample `sample`, and its number in that stream."""
        phase = self._phase(sample)
        before, after = (_share(phase.fractions, sample - phase.start + extra) for extra in (0, 1))
        place = next(number for number, (low, high) in enumerate(zip(before, after, strict=True)) if high > low)
        stream = phase.active[place]
        return stream, phase.given[stream] + before[place]


def _share(fractions: Sequence[int], samples: int) -> list[int]:
    """`samples` divided by nested rounding: exact, and the counts for n and n+1 differ in one place."""
    counts = []
    for fraction in fractions:
        counts.append((samples * fraction + ONE // 2) // ONE)
        samples -= counts[-1]
    return [*counts, samples]


def _first_with(fractions: Sequence[int], place: int, count: int) -> int:
    """The least number of samples of which `place` gets `count`."""
    bound = count
    while _share(fractions, bound)[place] < count:
        bound *= 2
    return bisect.bisect_left(range(bound + 1), count, key=lambda samples: _share(fractions, samples)[place])
