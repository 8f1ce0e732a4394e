"""A row shared out over ranks is attended to as on one device: outputs and every gradient, whatever the method, the documents and the lengths."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _spawn import spawn
from intarsia import ops
from intarsia.comm import Communicator
from intarsia.contracts import Batch
from intarsia.errors import PluginError, UsageError
from intarsia_eager.context import TrainContext
from intarsia_models_common.build import Scope
from intarsia_models_common.build import build as build_component
from intarsia_models_common.config import MLAConfig, RopeConfig
from intarsia_models_common.rope import Rope
from intarsia_parallel.context import block
from intarsia_parallel.context.cut import SequenceCut
from intarsia_parallel.context.parallel_context import ParallelContext, build
from intarsia_testing.communicator import ThreadCommunicator, run_ranks
from intarsia_testing.model import documents_of, positions_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# The reference of recurrences that can be cut is an example of a third party's family, which need not be installed.
sys.path.append(str(Path(__file__).parents[2] / "examples" / "recurrence"))
from acme_recurrence.recurrence import GatedRecurrence

SOFTMAX = ("ring", "gather", "ulysses", "auto")
Function = Callable[..., Tensor]
"""(context, inputs by name, each [B, S, ...], weights by name) -> [B, S, ...]."""


def batch_of(lengths: tuple[tuple[int, ...], ...]) -> Batch:
    documents_BS = documents_of(lengths)
    zeros = torch.zeros_like(documents_BS, dtype=torch.int64)
    return Batch(zeros, zeros, positions_of(documents_BS), documents_BS, lengths)


def values(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def gradients(
    function: Function, context: Any, inputs: dict[str, Tensor], weights: dict[str, Tensor], coefficients: Tensor
) -> dict[str, Tensor]:
    """The output, and the gradient of each input and weight."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    shared = {name: x.clone().requires_grad_() for name, x in weights.items()}
    y = function(context, leaves, shared)
    (y * coefficients).sum().backward()
    return {"output": y.detach()} | {name: x.grad for name, x in (leaves | shared).items()}  # type: ignore[dict-item]


def compare(
    function: Function,
    method: str,
    cut: SequenceCut,
    lengths: tuple[tuple[int, ...], ...],
    inputs: dict[str, Tensor],
    weights: dict[str, Tensor],
    tolerance: float,
) -> None:
    """All ranks together against one device."""
    batch = batch_of(lengths)
    alone = functools.partial(function, TrainContext.of(batch))
    coefficients = values({"y": tuple(alone(inputs, weights).shape)}, inputs[next(iter(inputs))].dtype)["y"]
    expected = gradients(function, TrainContext.of(batch), inputs, weights, coefficients)

    def work(comm: Communicator) -> dict[str, Tensor]:
        context = build(SimpleNamespace(context=method), cut.local(batch, comm.rank), (None,), cut, comm)
        local = {name: cut.take(x, comm.rank, 1) for name, x in inputs.items()}
        return gradients(function, context, local, weights, cut.take(coefficients, comm.rank, 1))

    found = run_ranks(cut.ranks, work)
    for name, right in expected.items():
        parts = [each[name] for each in found]
        # The gradients of weights are partial sums.
        whole = sum(part.double() for part in parts) if name in weights else cut.join(parts, 1).double()
        error = float((whole - right.double()).abs().max() / right.abs().max().clamp_min(0.1))
        assert error <= tolerance, f"{name}: relative error {error:.2e} ({method}, {cut})"


def softmax(context: Any, inputs: dict[str, Tensor], weights: dict[str, Tensor], **settings: Any) -> Tensor:
    return context.softmax("layers.0.attention", *(inputs[name] for name in "qkv"), sinks_H=weights.get("sinks"), **settings)


def attention_case(
    lengths: tuple[tuple[int, ...], ...],
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    sinks: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rows, tokens = len(lengths), sum(lengths[0])
    shapes = {"q": (rows, tokens, heads[0], dims[0]), "k": (rows, tokens, heads[1], dims[0]), "v": (rows, tokens, heads[1], dims[1])}
    return values(shapes, dtype), values({"sinks": (heads[0],)} if sinks else {}, dtype)


PACKED = ((9, 1, 13), (23,), (2, 20, 1))
ROWS = {
    "packed": PACKED,
    "whole": ((23,), (23,)),
    "at the parts' starts": ((12, 11), (6, 6, 6, 5)),
    "each row its own": ((3, 20), (16, 7)),
    "short": ((3,), (3,)),
    "shorter": ((1,),),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("cut", ["zigzag", "contiguous"])
@pytest.mark.parametrize("method", SOFTMAX)
def test_softmax_equals_one_device(method: str, cut: str, ranks: int) -> None:
    """Packed documents, 23 tokens that no number of ranks divides."""
    heads = (12, 6) if method == "ulysses" else (4, 2)
    inputs, weights = attention_case(PACKED, heads)
    compare(functools.partial(softmax, scale=0.3), method, SequenceCut.of(23, ranks, cut), PACKED, inputs, weights, 1e-12)


@pytest.mark.parametrize(("window", "cut"), list(itertools.product([1, 3, 7, 11, 100], ["zigzag", "contiguous"])))
@pytest.mark.parametrize("method", SOFTMAX)
def test_windows(method: str, cut: str, window: int) -> None:
    """Shorter and longer than a part, with documents and without."""
    for lengths in (PACKED, ((23,), (23,))):
        inputs, weights = attention_case(lengths)
        compare(functools.partial(softmax, scale=0.3, window=window), method, SequenceCut.of(23, 4, cut), lengths, inputs, weights, 1e-12)


@pytest.mark.parametrize("method", SOFTMAX)
@pytest.mark.parametrize("cut", ["zigzag", "contiguous"])
def test_sinks_softcap_and_value_dims(method: str, cut: str) -> None:
    inputs, weights = attention_case(PACKED, (6, 3), (8, 5), sinks=True)
    function = functools.partial(softmax, scale=0.7, window=6, softcap=1.5)
    compare(function, method, SequenceCut.of(23, 3, cut), PACKED, inputs, weights, 1e-12)
    compare(function, method, SequenceCut.of(23, 2, cut), PACKED, inputs, weights, 1e-12)


@pytest.mark.parametrize("method", SOFTMAX)
@pytest.mark.parametrize("lengths", [((3,), (3,)), ((1,),), ((2,), (2,)), ((1, 1, 1),), ((2, 3),)], ids=str)
def test_rows_shorter_than_the_pieces(method: str, lengths: tuple[tuple[int, ...], ...]) -> None:
    """Ranks without tokens take part."""
    inputs, weights = attention_case(lengths, (4, 1), sinks=True)
    for cut in ("zigzag", "contiguous"):
        compare(functools.partial(softmax, scale=0.3), method, SequenceCut.of(sum(lengths[0]), 4, cut), lengths, inputs, weights, 1e-12)


@pytest.mark.parametrize(("heads", "ranks"), [((8, 2), 4), ((8, 1), 2), ((6, 2), 3), ((6, 3), 2), ((6, 2), 2), ((4, 4), 4)], ids=str)
def test_ulysses_shares_key_value_heads(heads: tuple[int, int], ranks: int) -> None:
    inputs, weights = attention_case(PACKED, heads, (8, 4), sinks=True)
    compare(functools.partial(softmax, scale=0.3), "ulysses", SequenceCut.of(23, ranks), PACKED, inputs, weights, 1e-12)


def test_heads_that_do_not_divide_are_refused() -> None:
    inputs, weights = attention_case(PACKED, (6, 2))
    with pytest.raises(UsageError, match=r"'layers\.0\.attention'.*6 query heads cannot be shared out over cp 4; nearest: cp 3 or 6"):
        compare(functools.partial(softmax, scale=0.3), "ulysses", SequenceCut.of(23, 4), PACKED, inputs, weights, 1e-12)


@pytest.mark.parametrize("method", SOFTMAX)
def test_any_cut_will_do(method: str) -> None:
    """Rank 0 with 0, 3, 4 and 7 of two documents of four."""
    cut = SequenceCut(8, (((0, 1), (3, 5), (7, 8)), ((1, 3), (5, 7))))
    inputs, weights = attention_case(((4, 4),))
    compare(functools.partial(softmax, scale=0.3), method, cut, ((4, 4),), inputs, weights, 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("method", SOFTMAX)
def test_narrow_dtypes(method: str, dtype: torch.dtype, tolerance: float) -> None:
    inputs, weights = attention_case(PACKED, sinks=True, dtype=dtype)
    compare(functools.partial(softmax, scale=0.3), method, SequenceCut.of(23, 4), PACKED, inputs, weights, tolerance)


@pytest.mark.parametrize("method", SOFTMAX)
def test_recomputed_blocks(method: str) -> None:
    def function(context: Any, inputs: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
        def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            y = context.softmax("a", q, k, v, scale=0.3) * 2
            return context.softmax("b", y, k, v, scale=0.3)

        return checkpoint(block, *(inputs[name] for name in "qkv"), use_reentrant=False)

    inputs, weights = attention_case(PACKED)
    compare(function, method, SequenceCut.of(23, 4), PACKED, inputs, weights, 1e-12)


def test_chunked_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores bounded to a few queries at a time, in forward and backward."""
    inputs, weights = attention_case(PACKED)
    monkeypatch.setattr(block, "SCORE_ELEMENTS", 64)
    compare(functools.partial(softmax, scale=0.3, window=5), "ring", SequenceCut.of(23, 3), PACKED, inputs, weights, 1e-12)


@pytest.mark.parametrize(("window", "calls", "tokens"), [(3, 1, [0, 2, 2, 2]), (None, 3, [0, 4, 8, 12])])
def test_the_ring_moves_what_is_seen(window: int | None, calls: int, tokens: list[int]) -> None:
    """Four ranks with four tokens each: a window of 3 moves two of them, in one step; without, each rank gets what lies before it."""
    inputs, weights = attention_case(((16,),), (2, 1), (4, 4))
    cut = SequenceCut.of(16, 4, "contiguous")

    def work(comm: Communicator) -> tuple[int, int]:
        context = build(SimpleNamespace(context="ring"), cut.local(batch_of(((16,),)), comm.rank), (window,), cut, comm)
        softmax(context, {name: cut.take(x, comm.rank, 1) for name, x in inputs.items()}, weights, scale=0.3, window=window)
        statistic = comm.stats()["ring"]
        return statistic.calls, statistic.bytes

    token_bytes = 8 * 8  # a key and a value of four float64 each
    assert run_ranks(4, work) == [(calls, token_bytes * each) for each in tokens]


def test_the_ring_holds_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides its own, while a block is computed and the next is on its way, in forward and backward, on six ranks."""
    inputs, weights = attention_case(((24,),), (2, 1), (4, 4))
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    exchange = ThreadCommunicator._exchange

    def counted(self: ThreadCommunicator, sends: list[Tensor], receive_counts: list[int]) -> list[Tensor]:
        received = exchange(self, sends, receive_counts)
        if sum(receive_counts) and self.what == "ring":
            block = next(part for part in received if part.numel())
            held[self.rank] = held.get(self.rank, 0) + 1
            most[self.rank] = max(most.get(self.rank, 0), held[self.rank])
            weakref.finalize(block.untyped_storage(), release, self.rank)
        return received

    def release(rank: int) -> None:
        held[rank] -= 1

    def named(self: ThreadCommunicator, sends: Any, receive_counts: Any, what: str = "") -> list[Tensor]:
        self.what = what
        return Communicator.exchange(self, sends, receive_counts, what)

    monkeypatch.setattr(ThreadCommunicator, "_exchange", counted)
    monkeypatch.setattr(ThreadCommunicator, "exchange", named)
    compare(functools.partial(softmax, scale=0.3), "ring", SequenceCut.of(24, 6), ((24,),), inputs, weights, 1e-12)
    assert set(most.values()) == {2} and len(most) == 6 and set(held.values()) == {0}


def latent_attention(context: Any, inputs: dict[str, Tensor], weights: dict[str, Tensor], fast: bool = False) -> Tensor:
    """Keys and values of two heads made of a latent, as MLA does."""

    def attend(latent_BTC: Tensor, positions_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        k, v = (torch.einsum("btc,chd->bthd", latent_BTC, weights[name]) for name in ("up_k", "up_v"))
        if fast and isinstance(context, ParallelContext):
            return context.attention(inputs["q"], k, v, scale=0.3)
        return ops.attention(
            inputs["q"],
            k,
            v,
            scale=0.3,
            documents_q_BS=context.documents_BS,
            documents_k_BT=documents_BT,
            positions_q_BS=context.positions_BS,
            positions_k_BT=positions_BT,
        )

    return context.latent("layers.0.attention", inputs["latent"], attend)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("lengths", [PACKED, ((23,), (23,)), ((2,), (2,))], ids=str)
@pytest.mark.parametrize("cut", ["zigzag", "contiguous"])
def test_latents_are_gathered(cut: str, lengths: tuple[tuple[int, ...], ...], fast: bool) -> None:
    rows, tokens = len(lengths), sum(lengths[0])
    inputs = values({"q": (rows, tokens, 2, 6), "latent": (rows, tokens, 5)}, torch.float64)
    weights = values({"up_k": (5, 2, 6), "up_v": (5, 2, 4)}, torch.float64)
    for ranks in (2, 3, 4):
        compare(functools.partial(latent_attention, fast=fast), "ring", SequenceCut.of(tokens, ranks, cut), lengths, inputs, weights, 1e-12)


@pytest.mark.parametrize("lengths", [PACKED, ((23,), (23,)), ((2,), (2,))], ids=str)
def test_mla_reads_segments_and_no_mask(lengths: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixer takes a context's own attention, in training and, where nothing is differentiated, in its absorbed form."""
    scope = Scope("layers.0.attention", 16, 0, 1, True, 0.3, 0.3)
    made = functools.partial(build_component, MLAConfig(heads=2, kv_rank=8, q_rank=None, nope_dim=4, rope_dim=4, value_dim=6), scope)
    weights = {name: x / 4 for name, x in values({n: tuple(p.shape) for n, p in made().named_parameters()}, torch.float32).items()}
    rope, rows, tokens, calls = Rope(RopeConfig(dim=4), scope), len(lengths), sum(lengths[0]), []
    inputs = values({"x": (rows, tokens, 16)}, torch.float32)
    own = ParallelContext.attention

    def counted(self: ParallelContext, *arguments: Any, **settings: Any) -> Tensor:
        calls.append(arguments[1].shape[2])
        return own(self, *arguments, **settings)

    def mla(context: Any, inputs: dict[str, Tensor], weights: dict[str, Tensor], form: str) -> Tensor:
        mixer = made()  # each rank's own: ranks are threads
        mixer.form = form
        return torch.func.functional_call(mixer, weights, (inputs["x"], rope(context.positions_BS), context))

    monkeypatch.setattr(ParallelContext, "attention", counted)
    for form, heads in (("plain", 2), ("absorbed", 1)):
        for ranks in (2, 3):
            calls.clear()
            compare(functools.partial(mla, form=form), "ring", SequenceCut.of(tokens, ranks), lengths, inputs, weights, 1e-5)
            assert calls == [heads] * ranks


def recurrence(context: Any, inputs: dict[str, Tensor], weights: dict[str, Tensor], attends: bool = False) -> Tensor:
    """A gated recurrence and, in a hybrid, attention over what comes out of it."""
    q, k, v, decay = (inputs[name] for name in ("q", "k", "v", "decay"))
    y = context.recurrent("layers.0.mixer", "state", GatedRecurrence(), q, k, v, -decay.square() * weights["rate"])
    return context.softmax("layers.1.attention", y, k, v, scale=0.3) if attends else y


@pytest.mark.parametrize("lengths", [*ROWS.values()], ids=[*ROWS])
def test_states_are_passed_on(lengths: tuple[tuple[int, ...], ...]) -> None:
    """Documents that begin within a part, at its start, and that span several; rows shorter than the ranks."""
    rows, tokens = len(lengths), sum(lengths[0])
    inputs = values({**dict.fromkeys("qkv", (rows, tokens, 2, 3)), "decay": (rows, tokens, 2)}, torch.float64)
    weights = values({"rate": (2,)}, torch.float64)
    weights = {"rate": weights["rate"].abs()}
    for ranks in (2, 3, 4):
        compare(recurrence, "ring", SequenceCut.of(tokens, ranks, "contiguous"), lengths, inputs, weights, 1e-12)
        compare(
            functools.partial(recurrence, attends=True),
            "ring",
            SequenceCut.of(tokens, ranks, "contiguous"),
            lengths,
            inputs,
            weights,
            1e-12,
        )


def test_no_state_travels_where_documents_end_with_the_parts() -> None:
    cut, lengths = SequenceCut.of(8, 2, "contiguous"), ((4, 4), (2, 2, 4))
    inputs = values({**dict.fromkeys("qkv", (2, 8, 2, 3)), "decay": (2, 8, 2)}, torch.float64)

    def work(comm: Communicator) -> set[str]:
        context = build(SimpleNamespace(context="ring"), cut.local(batch_of(lengths), comm.rank), (None,), cut, comm)
        recurrence(context, {name: cut.take(x, comm.rank, 1) for name, x in inputs.items()}, {"rate": torch.ones(2, dtype=torch.float64)})
        return set(comm.stats())

    assert run_ranks(2, work) == [set(), set()]


def test_a_recurrence_needs_parts_in_order() -> None:
    context = ParallelContext("ring", torch.arange(2)[None], ((4,),), (None,), SequenceCut.of(4, 2), SimpleNamespace(size=2, rank=0))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'a' has a recurrence, which needs parts in the row's order"):
        context.recurrent("a", "state", GatedRecurrence(), torch.zeros(1, 2, 1))


def test_what_is_refused() -> None:
    cut = SequenceCut.of(4, 2)
    context = ParallelContext("ring", torch.arange(2)[None], ((4,),), (None,), cut, SimpleNamespace(size=2, rank=0))  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=r"'layers\.0\.attention' asks for a context of kind 'indexed', which ParallelContext does not serve"
    ):
        context.indexed("layers.0.attention", torch.zeros(1))
    with pytest.raises(UsageError, match="has no `carry` and `combine`"):
        context.recurrent("layers.0.mixer", "state", lambda x, **settings: (x, None), torch.zeros(1, 2, 1))
    with pytest.raises(UsageError, match="ring"):
        ParallelContext("rng", torch.arange(2)[None], ((4,),), (None,), cut, SimpleNamespace(size=2, rank=0))  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="group of 3"):
        ParallelContext("ring", torch.arange(2)[None], ((4,),), (None,), cut, SimpleNamespace(size=3, rank=0))  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="holds 2 of 4 tokens, the batch has 3"):
        ParallelContext("ring", torch.arange(3)[None], ((4,),), (None,), cut, SimpleNamespace(size=2, rank=0))  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="documents of 5 tokens"):
        ParallelContext("ring", torch.arange(2)[None], ((5,),), (None,), cut, SimpleNamespace(size=2, rank=0))  # type: ignore[arg-type]


def in_processes(world: Communicator) -> dict[str, float]:
    """The largest differences between this rank's part and one device's, over gloo, by each method."""
    inputs, weights = attention_case(PACKED, sinks=True)
    batch, cut, function = batch_of(PACKED), SequenceCut.of(23, world.size), functools.partial(softmax, scale=0.3, window=9)
    coefficients = values({"y": (3, 23, 4, 8)}, torch.float64)["y"]
    right = gradients(function, TrainContext.of(batch), inputs, weights, coefficients)
    parts = {name: x if name == "sinks" else cut.take(x, world.rank, 1) for name, x in right.items()}
    local = {name: cut.take(x, world.rank, 1) for name, x in inputs.items()}
    differences = {}
    for method in ("ring", "gather", "ulysses"):
        context = build(SimpleNamespace(context=method), cut.local(batch, world.rank), (9,), cut, world)
        found = gradients(function, context, local, weights, cut.take(coefficients, world.rank, 1))
        world.all_reduce(found["sinks"])
        differences |= {f"{method} {name}": float((found[name] - part).abs().max()) for name, part in parts.items()}
    return differences


def test_processes() -> None:
    for differences in spawn(in_processes, 2):
        assert len(differences) == 15 and max(differences.values()) < 1e-12, differences
