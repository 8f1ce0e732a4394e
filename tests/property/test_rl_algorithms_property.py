"""However samples are packed into rows, micro-batches and ranks: sums, divided once, and gradients are those of all samples at once. Float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from intarsia.contracts import IGNORE, Batch
from intarsia_rl.algorithms.config import DAPOConfig, DrGRPOConfig, GRPOConfig, PolicyLossConfig, RLOOConfig
from intarsia_rl.algorithms.policy import build, trained_log_probs
from intarsia_rl.contracts import Sample, Segment
from intarsia_testing.model import documents_of

VOCABULARY, DIM = 7, 4
MASKED = {"importance_outside": "mask", "importance_cap": 1.5, "importance_floor": 0.5, "importance_level": "sequence_mean"}
CONFIGS = [
    GRPOConfig(kl_coefficient=0.1),
    DrGRPOConfig(length=5),
    DAPOConfig(longest=4, length_buffer=2, **MASKED),
    RLOOConfig(importance_level="sequence", kl_coefficient=0.2, kl_estimator="k1"),
]


class Head:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.head_weight_VD = torch.randn(VOCABULARY, DIM, generator=generator, dtype=torch.float64).requires_grad_()


def sample(number: int, trained: list[bool], reward: float) -> Sample:
    tokens = tuple((number * 5 + place * 3) % VOCABULARY for place in range(len(trained)))
    numbers = tuple(-1.0 - math.cos(number + place) if is_trained else 0.0 for place, is_trained in enumerate(trained))
    versions = tuple(0 if is_trained else -1 for is_trained in trained)
    return Sample(f"g0.{number}", 0, number, "t", (Segment(tokens, tuple(trained), numbers, versions),), reward=reward)


def hidden_of(one: Sample) -> torch.Tensor:
    """[tokens, D]: what a model would say of this sample's tokens, wherever they lie."""
    return torch.randn(len(one.segments[0].tokens), DIM, generator=torch.Generator().manual_seed(one.member), dtype=torch.float64)


def packed(algorithm: Any, rows: list[list[Sample]], advantages: dict[str, float]) -> tuple[Batch, torch.Tensor]:
    """A batch of rows, and its hidden states."""
    size = max(sum(len(one.segments[0].tokens) for one in row) for row in rows) + 1
    names = ("old_log_probs_BS", "advantages_BS", "weights_BS", "reference_log_probs_BS")
    extra: dict[str, Any] = {name: torch.zeros(len(rows), size, dtype=torch.float64) for name in names}
    extra["versions_BS"] = torch.full((len(rows), size), -1)
    labels_BS, hidden_BSD = torch.full((len(rows), size), IGNORE), torch.full((len(rows), size, DIM), 0.25, dtype=torch.float64)
    lengths = []
    for number, row in enumerate(rows):
        at = 0
        for one in row:
            segment, hidden = one.segments[0], hidden_of(one)
            for place in range(len(segment.tokens)):
                hidden_BSD[number, at + place] = hidden[place]
                if place and segment.trained[place]:
                    here = number, at + place - 1
                    labels_BS[here] = segment.tokens[place]
                    extra["old_log_probs_BS"][here] = segment.log_probs[place]
                    extra["reference_log_probs_BS"][here] = segment.log_probs[place] * 1.1
                    extra["advantages_BS"][here] = advantages[one.id]
                    extra["weights_BS"][here] = algorithm.token_weight(one)
                    extra["versions_BS"][here] = 0
            at += len(segment.tokens)
        lengths.append((*(len(one.segments[0].tokens) for one in row), size - at))
    extra["version"] = 1
    documents = documents_of(tuple(lengths))
    return Batch(labels_BS.clamp_min(0), labels_BS, documents, documents, tuple(lengths), extra=extra), hidden_BSD


def step(config: Any, split: list[list[list[Sample]]], advantages: dict[str, float]) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient of the head and metrics of a step whose micro-batches (of all ranks) are `split`."""
    model, loss = Head(), build(PolicyLossConfig(algorithm=config, chunk=3))
    batches = [packed(loss.algorithm, rows, advantages) for rows in split]
    tokens = sum(loss.count(batch) for batch, _ in batches)
    count = sum(loss.algorithm.count(one) for rows in split for row in rows for one in row)
    scale = 1.0 / tokens if tokens else 0.0
    total, sums = 0.0, dict[str, float]()
    for batch, hidden_BSD in batches:
        batch.extra["per_token"] = count / max(1, tokens)
        result = loss(model, hidden_BSD, batch)
        (result.total * scale).backward()
        total += result.total.item() * scale
        for name, value in result.sums.items():
            sums[name] = sums.get(name, 0.0) + value.item() * scale
    assert model.head_weight_VD.grad is not None
    return total, model.head_weight_VD.grad, sums


SAMPLES = st.lists(
    st.tuples(st.lists(st.booleans(), min_size=1, max_size=6), st.sampled_from([0.0, 1.0, 0.25, -2.0])), min_size=1, max_size=7
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
@settings(max_examples=20, deadline=None)
@given(SAMPLES, st.randoms(use_true_random=False))
def test_any_split_is_all_at_once(config, drawn, random):
    samples = [sample(number, [False, *trained], reward) for number, (trained, reward) in enumerate(drawn)]
    algorithm = build(PolicyLossConfig(algorithm=config)).algorithm
    advantages = dict(zip([one.id for one in samples], algorithm.advantages(samples), strict=True))
    whole = step(config, [[samples]], advantages)
    shuffled = random.sample(samples, len(samples))
    split: list[list[list[Sample]]] = []
    while shuffled:
        row, shuffled = shuffled[: (cut := random.randint(1, len(shuffled)))], shuffled[cut:]
        if split and random.random() < 0.5:
            split[-1].append(row)
        else:
            split.append([row])
    split.append([[]])  # a micro-batch of padding alone
    found = step(config, split, advantages)
    assert found[0] == pytest.approx(whole[0], rel=1e-11, abs=1e-13)
    torch.testing.assert_close(found[1], whole[1], rtol=1e-10, atol=1e-13)
    assert found[2] == pytest.approx(whole[2], rel=1e-11, abs=1e-12)
    assert bool(torch.isfinite(whole[1]).all())


def test_the_division_is_by_the_counts_of_all():
    """Two micro-batches, one of 1 token, one of 3, ratios of 1: DAPO's loss is -(a + 3 b) / 4, and not the mean of means; GRPO's is the mean over the two samples."""
    one, three = sample(0, [False, True], 0.0), sample(1, [False, True, True, True], 0.0)
    assert divided(DAPOConfig(), one, three, 1.0) == -(4.0 + 3 * 1.0) / 4
    assert divided(GRPOConfig(), one, three, 2 / 4) == pytest.approx(-(4.0 + 1.0) / 2, rel=1e-12)


def divided(config: Any, one: Sample, three: Sample, per_token: float) -> float:
    """The step's loss."""
    model, loss = Head(), build(PolicyLossConfig(algorithm=config))
    advantages = {one.id: 4.0, three.id: 1.0}
    total = 0.0
    for each in (one, three):
        batch, hidden_BSD = packed(loss.algorithm, [[each]], advantages)
        where_N = (batch.labels_BS != IGNORE).flatten().nonzero().squeeze(1)
        batch.extra["old_log_probs_BS"].view(-1)[where_N] = trained_log_probs(model, hidden_BSD, batch.labels_BS, where_N, 9)[0].detach()
        batch.extra["per_token"] = per_token
        total += loss(model, hidden_BSD, batch).total.item() / 4
    return total
