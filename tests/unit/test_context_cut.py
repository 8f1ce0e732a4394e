"""Which tokens of a row each context-parallel rank holds, how batches are cut, who sees whose keys, and the rule of `auto`."""

from __future__ import annotations

import pytest
import torch
from intarsia.contracts import Batch
from intarsia.errors import PluginError, UsageError
from intarsia_parallel.context import choose, ulysses
from intarsia_parallel.context.cut import SequenceCut, dimensions, length, sequence_dim
from intarsia_parallel.context.plan import Documents, Plan
from intarsia_testing.model import documents_of, positions_of


def batch_of(lengths: tuple[tuple[int, ...], ...], **extra: object) -> Batch:
    documents_BS = documents_of(lengths)
    tokens_BS = torch.arange(documents_BS.numel()).view_as(documents_BS)
    return Batch(tokens_BS, tokens_BS + 1, positions_of(documents_BS), documents_BS, lengths, extra=dict(extra))


def test_zigzag_takes_from_both_ends() -> None:
    cut = SequenceCut.of(8, 2)
    assert [cut.indices(rank) for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert cut.ranges[1] == ((2, 6),), "pieces that touch are one"
    assert not cut.in_order


@pytest.mark.parametrize(
    ("tokens", "ranks", "method", "held"),
    [
        (10, 3, "contiguous", [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        (10, 2, "zigzag", [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]),
        (3, 2, "zigzag", [[0], [1, 2]]),  # shorter than 2 * cp
        (1, 3, "zigzag", [[0], [], []]),
        (2, 4, "contiguous", [[0], [1], [], []]),
        (0, 2, "zigzag", [[], []]),
        (5, 1, "zigzag", [[0, 1, 2, 3, 4]]),
    ],
)
def test_uneven_short_and_empty_parts(tokens: int, ranks: int, method: str, held: list[list[int]]) -> None:
    cut = SequenceCut.of(tokens, ranks, method)
    assert [cut.indices(rank) for rank in range(ranks)] == held
    assert cut.counts == tuple(map(len, held))


def test_positions_are_those_of_each_document() -> None:
    """Documents [0, 4, 8], rank 0 with tokens 0, 3, 4 and 7: rope sees 0, 3, 0, 3."""
    batch = batch_of(((4, 4),))
    cut = SequenceCut(8, (((0, 1), (3, 5), (7, 8)), ((1, 3), (5, 7))))
    local = cut.local(batch, 0)
    assert local.tokens_BS.tolist() == [[0, 3, 4, 7]]
    assert local.positions_BS.tolist() == [[0, 3, 0, 3]]
    assert local.documents_BS.tolist() == [[0, 0, 1, 1]]
    assert cut.local(batch, 1).positions_BS.tolist() == [[1, 2, 1, 2]]


def test_tensors_are_cut_along_the_dimension_that_their_name_says() -> None:
    lengths = ((3, 5), (8,))
    whole = torch.arange(3 * 2 * 8).view(3, 2, 8)
    following = torch.arange(2 * 8 * 2).view(2, 8, 2)
    extra = {"positions_3BS": whole, "following_BSK": following, "temperature": torch.ones(8), "weights_BV": torch.ones(2, 9), "bytes": 7}
    extra["nested"] = {"mask_S": torch.arange(8), "pair_BS": [whole[0], whole[1]]}
    batch = batch_of(lengths, **extra)
    local = SequenceCut.of(8, 2).local(batch, 0)
    index = [0, 1, 6, 7]
    assert local.extra["positions_3BS"].equal(whole[:, :, index])
    assert local.extra["following_BSK"].equal(following[:, index])
    assert local.extra["nested"]["mask_S"].tolist() == index
    assert [each.tolist() for each in local.extra["nested"]["pair_BS"]] == [whole[0][:, index].tolist(), whole[1][:, index].tolist()]
    assert local.extra["temperature"].shape == (8,) and local.extra["weights_BV"].shape == (2, 9) and local.extra["bytes"] == 7
    assert local.labels_BS.equal(batch.labels_BS[:, index])
    assert local.lengths == lengths, "masks are planned from the whole row's"
    assert batch.tokens_BS.shape == (2, 8)


def test_names() -> None:
    assert dimensions("positions_16BS") == ["16", "B", "S"] and sequence_dim("positions_16BS") == 2
    assert sequence_dim("tokens_BS") == 1 and sequence_dim("hidden_BSd") == 1
    assert sequence_dim("some_ids") is None and sequence_dim("scale") is None and sequence_dim("weights_VD") is None


def test_a_name_that_is_wrong_is_said() -> None:
    batch = batch_of(((8,),), mask_BS=torch.ones(8, 1))
    with pytest.raises(PluginError, match=r"'mask_BS' has shape \(8, 1\).*2 dimensions with the 8 tokens"):
        SequenceCut.of(8, 2).local(batch, 0)
    with pytest.raises(PluginError, match="'tokens_BS' has shape"):
        SequenceCut.of(9, 2).local(batch_of(((8,),)), 0)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="contiguous"):
        SequenceCut.of(8, 2, "contigous")
    with pytest.raises(UsageError, match="0 ranks"):
        SequenceCut.of(8, 0)
    with pytest.raises(PluginError, match="each index once"):
        SequenceCut(4, (((0, 2),), ((3, 4),)))
    with pytest.raises(UsageError, match="gather"):
        choose.check("gathr")


def test_a_window_needs_its_halo_only() -> None:
    plan = Plan(SequenceCut.of(64, 4, "contiguous"), Documents.of(((64,),)), window=5)
    assert plan.needs == (((0, 16),), ((12, 32),), ((28, 48),), ((44, 64),))
    assert plan.transfers[0][1] == ((12, 16),) and plan.transfers[0][2] == ()
    assert plan.shifts == (1,), "one step of the ring, of three"


def test_documents_end_what_is_seen() -> None:
    plan = Plan(SequenceCut.of(16, 2, "contiguous"), Documents.of(((8, 8),)), None)
    assert plan.shifts == ()
    plan = Plan(SequenceCut.of(16, 2, "contiguous"), Documents.of(((6, 10),)), None)
    assert plan.transfers[0][1] == ((6, 8),)
    two_rows = Plan(SequenceCut.of(16, 2, "contiguous"), Documents.of(((6, 10), (3, 13))), None)
    assert two_rows.transfers[0][1] == ((3, 8),), "what any row needs"


def test_heads_that_do_not_divide_are_refused_with_the_nearest() -> None:
    assert ulysses.obstacle(8, 4) is None
    assert ulysses.obstacle(6, 4) == "6 query heads cannot be shared out over cp 4; nearest: cp 3 or 6"
    assert ulysses.obstacle(2, 4) == "2 query heads cannot be shared out over cp 4; nearest: cp 2"
    assert ulysses.read_by(1, 8, 2, 4) == [0], "a key/value head that two ranks read"
    assert ulysses.read_by(1, 6, 2, 3) == [0, 1]
    assert ulysses.read_by(0, 6, 3, 2) == [0, 0, 1], "one for each query head where ranks share a group unevenly"


def test_the_rule_of_auto() -> None:
    def plan(tokens: int, window: int | None = None, ranks: int = 8) -> Plan:
        return Plan(SequenceCut.of(tokens, ranks), Documents.of(((tokens,),)), window)

    long = choose.choose(choose.Shape(1, 32, 32, 128, 128), plan(131072))
    assert long.method == "ring" and "131072 tokens, cp 8, 32 heads" in long.reason and "gather" in long.reason
    assert choose.choose(choose.Shape(1, 8, 8, 64, 64), plan(4096, 128, 4)).method == "gather"
    assert choose.choose(choose.Shape(1, 32, 32, 128, 128), plan(16384, ranks=8)).method == "ulysses"
    odd = choose.choose(choose.Shape(1, 6, 6, 128, 128), plan(16384, ranks=4))
    assert odd.method != "ulysses" and "not ulysses: 6 query heads" in odd.reason


def test_zigzag_shares_the_work_out() -> None:
    work = {}
    for method in ("zigzag", "contiguous"):
        plan = Plan(SequenceCut.of(4096, 4, method), Documents.of(((4096,),)), None)
        work[method] = [choose._pairs(plan, rank, plan.needs[rank]) for rank in range(4)]
    assert max(work["zigzag"]) <= 1.01 * min(work["zigzag"])
    assert max(work["contiguous"]) > 3 * min(work["contiguous"])
    assert sum(work["zigzag"]) == pytest.approx(4096 * 4096 / 2)


def test_length() -> None:
    assert length(()) == 0 and length(((1, 3), (5, 6))) == 3
