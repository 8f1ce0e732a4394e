"""The eager engine: what it does around the model, the following tokens, the loss of further depths, and whole models only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from intarsia import logical, ops
from intarsia.comm import SelfCommunicator
from intarsia.contracts import IGNORE, Batch, LossSum, PipelinePart, StagePart
from intarsia.errors import UsageError
from intarsia_eager.config import CrossEntropyConfig, EagerConfig
from intarsia_eager.context import TrainContext
from intarsia_eager.cross_entropy import CrossEntropy
from intarsia_eager.engine import EagerEngine, build
from intarsia_eager.following import FOLLOWING, FOLLOWING_LABELS, with_following
from intarsia_eager.not_finite import as_written
from torch import Tensor, nn

VOCABULARY = 12


def batch_of(tokens: Sequence[int], lengths: tuple[int, ...], ignored: tuple[int, ...] = ()) -> Batch:
    """One row of packed documents, the label of each token being the next one in its document."""
    documents = [number for number, length in enumerate(lengths) for _ in range(length)]
    ends = [sum(lengths[: number + 1]) - 1 for number in range(len(lengths))]
    labels = [IGNORE if place in (*ends, *ignored) else tokens[place + 1] for place in range(len(tokens))]
    positions = [place for length in lengths for place in range(length)]
    row = [torch.tensor([each]) for each in (tokens, labels, positions)]
    return Batch(*row, torch.tensor([documents], dtype=torch.int32), (lengths,))


class Model(nn.Module):
    """Embedding, and as many further hidden states as `predicts_ahead`, each the sum of what follows."""

    def __init__(self, ahead: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, 4, generator=torch.Generator().manual_seed(0)))
        self.predicts_ahead = ahead
        self.contexts: list[Any] = []

    @property
    def head_weight_VD(self) -> Tensor:
        return self.weight

    def forward(self, tokens_BS: Tensor, context: Any) -> Any:
        self.contexts.append(context)
        x_BSD = self.weight[tokens_BS]
        if context.following_BSK is None:
            return x_BSD
        hidden = [x_BSD]
        for depth in range(self.predicts_ahead):
            hidden.append(hidden[-1] + self.weight[context.following_BSK[..., depth]])
        return tuple(hidden)


# ---------------------------------------------------------------- the tokens further on


def test_following_tokens_and_labels_end_with_their_document() -> None:
    found = with_following(batch_of([1, 2, 3, 4, 5, 6, 7], (4, 3), ignored=(1,)), 2)
    assert found.extra[FOLLOWING][0].tolist() == [[2, 3], [3, 4], [4, 0], [0, 0], [6, 7], [7, 0], [0, 0]]
    # Depth k at i is the label of i + k; that of token 1 is not trained on.
    assert found.extra[FOLLOWING_LABELS][0].tolist() == [
        [IGNORE, 4],
        [4, IGNORE],
        [IGNORE, IGNORE],
        [IGNORE, IGNORE],
        [7, IGNORE],
        [IGNORE, IGNORE],
        [IGNORE, IGNORE],
    ]
    assert with_following(found, 2) is found and FOLLOWING not in with_following(batch_of([1, 2], (2,)), 0).extra


def test_following_does_not_depend_on_the_packing() -> None:
    packed = with_following(batch_of([1, 2, 3, 4, 5, 6, 7], (4, 3)), 3)
    alone = [with_following(batch_of(tokens, (len(tokens),)), 3) for tokens in ([1, 2, 3, 4], [5, 6, 7])]
    for name in (FOLLOWING, FOLLOWING_LABELS):
        assert torch.equal(packed.extra[name], torch.cat([each.extra[name] for each in alone], 1))


def test_depths_beyond_the_row_are_empty() -> None:
    found = with_following(batch_of([1, 2], (2,)), 4)
    assert found.extra[FOLLOWING][0].tolist() == [[2, 0, 0, 0], [0, 0, 0, 0]]
    assert found.extra[FOLLOWING_LABELS].unique().tolist() == [IGNORE]


# ---------------------------------------------------------------- the loss


def test_further_depths_come_on_top_in_training_only() -> None:
    model, loss = Model(2), CrossEntropy(CrossEntropyConfig(ahead_weight=0.5, chunk=3))
    batch = with_following(batch_of([1, 2, 3, 4, 5, 6, 7], (4, 3)), 2)
    hidden = model(batch.tokens_BS, TrainContext.of(batch))
    labels = [batch.labels_BS, *batch.extra[FOLLOWING_LABELS].unbind(-1)]
    each = [ops.cross_entropy(h.flatten(0, 1), model.weight, want.flatten()) for h, want in zip(hidden, labels, strict=True)]
    found = loss(model, hidden, batch)
    torch.testing.assert_close(found.total, each[0] + 0.25 * (each[1] + each[2]))
    torch.testing.assert_close(torch.stack([found.sums["ahead_1"], found.sums["ahead_2"]]), torch.stack(each[1:]).detach())
    model.eval()
    torch.testing.assert_close(loss(model, hidden, batch).total, each[0])


def test_a_models_own_cross_entropy_is_asked() -> None:
    class Own(Model):
        def cross_entropy(self, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, *, softcap: Any = None, chunk: int = 1) -> Tensor:
            assert (hidden_ND.shape, weight_VD is self.weight, labels_N.shape, softcap, chunk) == ((3, 4), True, (3,), None, 7)
            return hidden_ND.sum()

    batch = batch_of([1, 2, 3], (3,))
    assert CrossEntropy(CrossEntropyConfig(chunk=7))(Own(), torch.ones(1, 3, 4), batch).total == 12.0


def test_a_weight_that_is_no_weight_is_refused() -> None:
    for weight in (-0.1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=r"loss.ahead_weight"):
            CrossEntropy(CrossEntropyConfig(ahead_weight=weight))


# ---------------------------------------------------------------- the engine


class Sharded:
    """What a sharder is told."""

    def __init__(self) -> None:
        self.last: list[bool] = []

    def set_last_micro_batch(self, last: bool) -> None:
        self.last.append(last)


class Halves:
    """A Parallel whose part of each batch is the first half of the row."""

    part: PipelinePart | None = None

    def __init__(self, context: Any = None) -> None:
        self._context, self.seen = context, []

    def local(self, batch: Batch) -> Batch:
        half = batch.tokens_BS.shape[1] // 2
        cut = {name: getattr(batch, name)[:, :half] for name in ("tokens_BS", "labels_BS", "positions_BS", "documents_BS")}
        extra = {name: value[:, :half] if isinstance(value, Tensor) else value for name, value in batch.extra.items()}
        return dataclasses.replace(batch, **cut, lengths=((half,),), extra=extra)

    def context(self, batch: Batch, windows: Sequence[int | None]) -> Any:
        self.seen.append((batch.tokens_BS.shape, windows))
        return self._context


def test_a_step_runs_every_micro_batch_and_names_the_last() -> None:
    model = Model()
    engine, sharded = EagerEngine(model, CrossEntropy(CrossEntropyConfig())), Sharded()
    batches = [batch_of([1, 2, 3], (3,)), batch_of([4, 5, 6], (3,))]
    results = engine.run(batches, 0.5, sharded)  # type: ignore[arg-type]
    assert sharded.last == [False, True] and all(not result.total.requires_grad for result in results)
    want = torch.autograd.grad(sum(engine._forward(batch).total for batch in batches) * 0.5, model.weight)[0]
    torch.testing.assert_close(model.weight.grad, want)
    torch.testing.assert_close(engine.evaluate(batches[0]).total, results[0].total)


def test_following_tokens_are_added_before_the_batch_is_cut() -> None:
    model, parallel = Model(1), Halves()
    engine = EagerEngine(model, CrossEntropy(CrossEntropyConfig()), parallel)  # type: ignore[arg-type]
    result = engine.run([batch_of([1, 2, 3, 4], (4,))], 1.0, Sharded())[0]  # type: ignore[arg-type]
    # The last token of the half sees the first of the other half.
    assert model.contexts[0].following_BSK[0].tolist() == [[2], [3]] and set(result.sums) == {"ahead_1"}
    assert parallel.seen == [((1, 2), (None,))]


def test_a_parallels_own_context_is_used() -> None:
    context = TrainContext(torch.zeros(1, 2, dtype=torch.int64))
    model = Model()
    EagerEngine(model, CrossEntropy(CrossEntropyConfig()), Halves(context)).evaluate(batch_of([1, 2, 3, 4], (4,)))  # type: ignore[arg-type]
    assert model.contexts == [context]


def test_further_losses_of_the_model_join_the_sums() -> None:
    class Balanced(Model):
        def forward(self, tokens_BS: Tensor, context: Any) -> Any:
            x = super().forward(tokens_BS, context)
            return logical.add_loss(x, "balance", self.weight.sum())

    batch, found = batch_of([1, 2, 3], (3,)), []
    for model in (Model(), Balanced()):
        result = EagerEngine(model, CrossEntropy(CrossEntropyConfig())).micro_batch(batch, 0.5)
        found.append((model, result))
    (plain, plain_result), (balanced, result) = found
    assert result.total == plain_result.total and result.sums["balance"] == balanced.weight.sum()
    torch.testing.assert_close(balanced.weight.grad, plain.weight.grad + 0.5)
    assert EagerEngine(balanced, CrossEntropy(CrossEntropyConfig())).evaluate(batch).sums["balance"] == balanced.weight.sum()


def test_a_pipelines_part_is_refused_by_name() -> None:
    parallel = Halves()
    parallel.part = PipelinePart((StagePart(1, False, True, ("layers.1",)),), 2)
    with pytest.raises(UsageError, match=r"engine `eager` runs whole models.*mesh.pp is 2.*engine=pipeline"):
        build(EagerConfig(), Model(), CrossEntropy(CrossEntropyConfig()), None, parallel)  # type: ignore[arg-type]


def test_what_is_not_finite_is_named_with_its_micro_batch() -> None:
    class Wrong(Model):
        def forward(self, tokens_BS: Tensor, context: Any) -> Any:
            return super().forward(tokens_BS, context) * (float("nan") if 7 in tokens_BS else 1.0)

    class WithGradients(Sharded):
        def parameters(self) -> dict[str, nn.Parameter]:
            return {"weight": model.weight}

        def zero_gradients(self) -> None:
            model.weight.grad = None

    model = Wrong()
    batches = [batch_of([1, 2, 3], (3,)), dataclasses.replace(batch_of([7, 2, 3], (3,)), samples=(41, 42))]
    engine = EagerEngine(model, CrossEntropy(CrossEntropyConfig()))
    text = engine.explain_not_finite(batches, 1.0, WithGradients(), SelfCommunicator())  # type: ignore[arg-type]
    assert "First offending module: the model (Wrong), output of forward, on rank 0, in micro-batch 1 (samples 41, 42)." in text
    assert isinstance(engine.micro_batch(batches[0], 1.0), LossSum)


def test_regions_are_compiled_again_once_the_last_thread_has_looked() -> None:
    """Ranks that are threads of one process leave in any order; the compiler's stance is the process's."""
    compiled: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(str(graph))
        return graph.forward

    def double(x: Tensor) -> Tensor:
        return x + x

    region = torch.compile(double, backend=backend, fullgraph=True)
    first, second = as_written(), as_written()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert region(torch.ones(2)).tolist() == [2, 2] and not compiled, "one is still within"
    second.__exit__(None, None, None)
    assert region(torch.ones(2)).tolist() == [2, 2] and len(compiled) == 1
