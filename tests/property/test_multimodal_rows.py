"""For any lengths, patches and budgets: each document is in exactly one row of an epoch, and no row is above a budget. For any media: positions are those of the rule."""

from __future__ import annotations

import itertools

import numpy
from hypothesis import given
from hypothesis import strategies as st
from intarsia.contracts import Media
from intarsia_multimodal.contracts import Slot
from intarsia_multimodal.patches import positions_of
from intarsia_multimodal.rows import RowStream, pack

ROW, BUDGET = 24, 40
DOCUMENTS = st.lists(st.tuples(st.integers(1, ROW), st.integers(0, BUDGET)), min_size=1, max_size=60)


def arrays(documents):
    return (numpy.array(column, dtype=numpy.int64) for column in zip(*documents, strict=True))


@given(DOCUMENTS, st.integers(1, 20))
def test_rows_hold_each_document_once_within_their_budgets(documents, open_rows):
    lengths, patches = arrays(documents)
    rows = pack(lengths, patches, ROW, BUDGET, open_rows)
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(documents)))
    assert all(lengths[row].sum() <= ROW and patches[row].sum() <= BUDGET for row in rows)
    assert all(row == sorted(row) for row in rows), "documents keep their order within a row"
    if open_rows >= len(documents):
        for number, row in enumerate(rows[:-1]):
            first = rows[number + 1][0]
            before = [place for place in row if place < first]
            full = lengths[row].sum() == ROW
            assert full or first < row[0] or lengths[before].sum() + lengths[first] > ROW or patches[before].sum() + patches[first] > BUDGET


@given(DOCUMENTS, st.integers(0, 3), st.sampled_from(["concatenate", "one_per_row"]), st.one_of(st.none(), st.integers(0, 1 << 60)))
def test_epochs_are_permutations_of_the_same_rows(documents, epoch, packing, key):
    lengths, patches = arrays(documents)
    numbers = numpy.flatnonzero(lengths > 1)
    if not len(numbers):
        return
    stream = RowStream(lengths, patches, numbers, "source", row=ROW, budget=BUDGET, packing=packing, key=key, epochs=5, open_rows=4)
    rows = [[stream.numbers(each * stream.rows + number) for number in range(stream.rows)] for each in (0, epoch)]
    assert sorted(map(tuple, rows[0])) == sorted(map(tuple, rows[1]))
    assert sorted(itertools.chain.from_iterable(rows[1])) == numbers.tolist()
    assert stream.samples == 5 * stream.rows and stream.consumed(stream.samples) == (5 * lengths[numbers].sum(), 5.0)
    if packing == "one_per_row":
        assert stream.rows == len(numbers)
    if key is None:
        assert rows[0] == rows[1]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)), max_size=5), st.integers(0, 6))
def test_positions_follow_the_rule_token_by_token(media, rest):
    """Each medium: text before it, frames, rows and columns of features, with one mark before each frame."""
    slots, expected, counter, place = [], [], 0, 0

    def text(count):
        nonlocal counter, place
        for _ in range(count):
            expected.append((counter,) * 3)
            counter, place = counter + 1, place + 1

    for before, frames, rows, columns in media:
        text(before)
        at, spans = place, []
        for _ in range(frames):
            text(1)
            spans.append((place, rows * columns))
            expected += [(counter, counter + row, counter + column) for row in range(rows) for column in range(columns)]
            counter, place = counter + max(rows, columns), place + rows * columns
        slots.append(Slot(Media("video", b""), at, place, tuple(spans), (frames, 2 * rows, 2 * columns)))
    text(rest)
    assert positions_of(place, slots, 2).T.tolist() == [list(each) for each in expected]
