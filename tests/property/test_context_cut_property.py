"""Any cut holds every token once; what a plan says is seen is what the mask says."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from intarsia.ops.attention_reference import visible
from intarsia_parallel.context.cut import SequenceCut, length
from intarsia_parallel.context.plan import Documents, Plan, pieces
from intarsia_testing.model import documents_of


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, tuple[tuple[int, ...], ...]]:
    tokens = draw(st.integers(1, 24))
    result = []
    for _ in range(draw(st.integers(1, 3))):
        ends = sorted({*draw(st.lists(st.integers(1, tokens), max_size=4)), tokens})
        result.append(tuple(b - a for a, b in zip([0, *ends], ends, strict=False)))
    return tokens, tuple(result)


@given(st.integers(0, 60), st.integers(1, 9), st.sampled_from(["zigzag", "contiguous"]))
@settings(max_examples=200, deadline=None)
def test_every_token_once_and_back(tokens: int, ranks: int, method: str) -> None:
    cut = SequenceCut.of(tokens, ranks, method)
    assert sorted(index for rank in range(ranks) for index in cut.indices(rank)) == list(range(tokens))
    assert max(cut.counts) - min(cut.counts) <= (1 if method == "contiguous" else 2)
    assert cut.in_order or method == "zigzag"
    x_BS3 = torch.arange(2 * tokens * 3).view(2, tokens, 3)
    assert cut.join([cut.take(x_BS3, rank, 1) for rank in range(ranks)], 1).equal(x_BS3)


@given(rows(), st.integers(1, 5), st.sampled_from(["zigzag", "contiguous"]), st.none() | st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_segments_are_the_mask(shape: tuple[int, tuple[tuple[int, ...], ...]], ranks: int, method: str, window: int | None) -> None:
    tokens, lengths = shape
    plan = Plan(SequenceCut.of(tokens, ranks, method), Documents.of(lengths), window)
    documents = documents_of(lengths)
    mask = visible(tokens, tokens, torch.device("cpu"), window, documents, documents, None, None)
    found = torch.zeros(mask.shape, dtype=torch.int32)
    for rank in range(ranks):
        queries = plan.cut.indices(rank)
        seen = {key for query in queries for key in range(tokens) if bool(mask[:, query, key].any())}
        needed = {index for start, stop in plan.needs[rank] for index in range(start, stop)}
        assert needed == seen, "what is gathered is what some query of some row sees"
        for source in range(ranks):
            keys = plan.transfers[source][rank]
            held = plan.cut.indices(source)
            local = [index for start, stop in pieces(plan.cut.ranges[source], keys) for index in range(start, stop)]
            numbers = [held[i] for i in local]
            assert len(numbers) == length(keys)
            for segment in plan.segments(rank, keys):
                band = segment.lead >= segment.queries and segment.queries <= segment.keys
                assert segment.is_full(window) or segment.lead == 0 or band, "what fast kernels take"
                for a in range(segment.queries):
                    one = 0
                    for b in range(segment.keys):
                        distance = (a - segment.queries) - (b - segment.keys) + segment.lead
                        if distance >= 0 and (window is None or distance < window):
                            found[segment.row, queries[segment.query + a], numbers[segment.key + b]] += 1
                            one += 1
                    assert one, "every query of a segment sees a key"
    assert found.equal(mask.expand_as(found).to(torch.int32)), "each pair once"
