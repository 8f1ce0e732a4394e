"""Losses of every algorithm against numbers worked out by hand, and what must hold exactly."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from intarsia.contracts import IGNORE, Batch
from intarsia.errors import PluginError, UsageError
from intarsia.plugins import current
from intarsia_rl.algorithms.config import DAPOConfig, DrGRPOConfig, GRPOConfig, PolicyLossConfig, RLOOConfig
from intarsia_rl.algorithms.policy import PolicyLoss, build
from intarsia_rl.contracts import Sample, Segment

ALGORITHMS = [GRPOConfig(), DrGRPOConfig(length=8), DAPOConfig(), RLOOConfig()]
NO_CLIP = {"clip_low": None, "clip_high": None}


def sample(reward: float, tokens: int = 2, member: int = 0, **changes: Any) -> Sample:
    segment = Segment((7, *range(tokens)), (False, *[True] * tokens), (0.0, *[-1.0] * tokens), (-1, *[0] * tokens))
    return Sample(f"g0.{member}", 0, member, "t", (segment,), reward=reward, **changes)


def group(*rewards: float, tokens: int = 2) -> list[Sample]:
    return [sample(reward, tokens, member) for member, reward in enumerate(rewards)]


def loss_of(
    config: Any, log_probs: list[float], old: list[float], advantages: list[float], weights: list[float] | None = None, **extra: Any
) -> Any:
    """(total, gradient by each log-probability, sums)."""
    x = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    given = {"old_log_probs": old, "advantages": advantages, "weights": weights or [1.0] * len(old), "versions": [0.0] * len(old), **extra}
    tensors = {name: torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value for name, value in given.items()}
    total, sums = current().build(config).loss(x, tensors)
    (grad,) = torch.autograd.grad(total, x)
    return total.item(), grad.tolist(), {name: value.item() for name, value in sums.items()}


# ---------------------------------------------------------------- advantages, weights, counts


def test_advantages_by_hand():
    """Rewards 1, 0, 0, 3: mean 1, squares 0, 1, 1, 4, deviation sqrt(1.5)."""
    samples = group(1.0, 0.0, 0.0, 3.0)
    deviation = math.sqrt(1.5)
    expected = [0.0, -1 / deviation, -1 / deviation, 2 / deviation]
    assert current().build(GRPOConfig(epsilon=0.0)).advantages(samples) == pytest.approx(expected, abs=1e-15)
    assert current().build(GRPOConfig(epsilon=0.5)).advantages(samples)[3] == pytest.approx(2 / (deviation + 0.5), abs=1e-15)
    assert current().build(DAPOConfig(epsilon=0.0)).advantages(samples) == pytest.approx(expected, abs=1e-15)
    assert current().build(DrGRPOConfig()).advantages(samples) == [0.0, -1.0, -1.0, 2.0]
    # Against the mean of the other three: 1 - 3/3, 0 - 4/3, 0 - 4/3, 3 - 1/3.
    assert current().build(RLOOConfig()).advantages(samples) == pytest.approx([0.0, -4 / 3, -4 / 3, 8 / 3], abs=1e-15)


@pytest.mark.parametrize("config", ALGORITHMS, ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("rewards", [(0.1,), (-3.0,), (0.1, 0.1, 0.1), (0.0, 0.0), (), (1e99, 1e99)], ids=str)
def test_groups_of_one_and_of_equal_rewards_are_worth_exactly_nothing(config, rewards):
    algorithm = current().build(config)
    assert algorithm.advantages(group(*rewards)) == [0.0] * len(rewards)


@pytest.mark.parametrize("config", ALGORITHMS, ids=lambda config: type(config).__name__)
def test_advantages_are_finite_whatever_the_scale(config):
    algorithm = current().build(config)
    for rewards in ((1e99, -1e99, 0.0), (5e-324, 0.0), (1e-160, -1e-160, 1e-170), (0.1 + 0.2, 0.3)):
        advantages = algorithm.advantages(group(*rewards))
        assert all(math.isfinite(value) for value in advantages)
        assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-9 * max(map(abs, advantages)))
    for reward in (math.nan, math.inf, -1e101):
        with pytest.raises(UsageError, match=r"Sample g0.1 of task t has the reward"):
            algorithm.advantages(group(0.0, reward))


def test_weights_and_counts():
    long = sample(1.0, 5)
    for config, weight, count in (
        (GRPOConfig(), 0.2, 1),
        (DrGRPOConfig(length=8), 0.125, 1),
        (DAPOConfig(), 1.0, 5),
        (RLOOConfig(), 1.0, 1),
    ):
        algorithm = current().build(config)
        assert (algorithm.token_weight(long), algorithm.count(long)) == (weight, count)
        assert (algorithm.token_weight(sample(1.0, 0)), algorithm.count(sample(1.0, 0))) == (0.0, 0)
        skipping = current().build(type(config)(skip_truncated=True))
        cut = sample(1.0, 5, truncated=True)
        assert (skipping.token_weight(cut), skipping.count(cut), algorithm.count(cut)) == (0.0, 0, count)


def test_groups_that_are_kept():
    dapo, grpo = current().build(DAPOConfig()), current().build(GRPOConfig())
    for rewards, taught in (((1.0, 1.0), False), ((1.0,), False), ((0.0, 1.0), True)):
        samples = group(*rewards)
        assert dapo.keeps(samples, dapo.advantages(samples)) is taught
        assert grpo.keeps(samples, grpo.advantages(samples)) is True
    nothing = group(0.0, 1.0, tokens=0)
    assert not grpo.keeps(nothing, [1.0, -1.0]) and not grpo.keeps([], [])


def test_penalty_of_length_by_hand():
    dapo = current().build(DAPOConfig(longest=10, length_buffer=4))
    assert [dapo.penalty(sample(0.0, tokens)) for tokens in (1, 6, 7, 9, 10, 50)] == [0.0, 0.0, 0.25, 0.75, 1.0, 1.0]
    assert current().build(DAPOConfig(longest=10)).penalty(sample(0.0, 9)) == 0.0
    # Rewards 1, 1 with lengths 8 and 2: 0.5 and 1, differences -0.25 and 0.25, deviation 0.25.
    plain = current().build(DAPOConfig(longest=10, length_buffer=4, epsilon=0.0))
    assert plain.advantages([sample(1.0, 8), sample(1.0, 2)]) == pytest.approx([-1.0, 1.0])


# ---------------------------------------------------------------- losses by hand


def test_clipped_objective_by_hand():
    """Ratios 2, 1/2, 2, 1/2, 1 with bounds 0.8 and 1.2: the bound counts for (2, a > 0) and (1/2, a < 0)."""
    ln2 = math.log(2)
    new, old = [-1.0] * 5, [-1.0 - ln2, -1.0 + ln2, -1.0 - ln2, -1.0 + ln2, -1.0]
    total, grad, sums = loss_of(GRPOConfig(), new, old, [1.0, 1.0, -1.0, -1.0, 3.0])
    assert total == pytest.approx(-(1.2 + 0.5 - 2.0 - 0.8 + 3.0))
    assert grad == pytest.approx([0.0, -0.5, 2.0, 0.0, -3.0])
    assert sums["clip_share"] == 2 and sums["ratio_mean"] == pytest.approx(6.0)
    # k3 of the generating policy: r - 1 - ln r.
    assert sums["kl"] == pytest.approx(2 * (1 - ln2) + 2 * (-0.5 + ln2))
    wider, grad, sums = loss_of(DAPOConfig(), new, old, [1.0, 1.0, -1.0, -1.0, 3.0], [1.0, 2.0, 1.0, 1.0, 0.5])
    assert wider == pytest.approx(-(1.28 + 2 * 0.5 - 2.0 - 0.8 + 1.5))
    assert grad == pytest.approx([0.0, -1.0, 2.0, 0.0, -1.5])


def test_without_bounds_the_ratio_counts():
    total, grad, sums = loss_of(GRPOConfig(**NO_CLIP), [-1.0], [-1.0 - math.log(4)], [0.5])
    assert (total, grad[0], sums["clip_share"]) == (pytest.approx(-2.0), pytest.approx(-2.0), 0)
    low_only, grad, _ = loss_of(GRPOConfig(clip_high=None), [-1.0, -1.0], [-1.0 - math.log(4), -1.0 + math.log(4)], [1.0, -1.0])
    assert low_only == pytest.approx(-(4.0 - 0.8)) and grad == pytest.approx([-4.0, 0.0])


def test_truncated_importance_weights_by_hand():
    """RLOO with a cap of 2 and ratios 4, 1.5: the gradient of -w log p a, with w = 2 and 1.5."""
    old = [-1.0 - math.log(4), -1.0 - math.log(1.5)]
    total, grad, sums = loss_of(RLOOConfig(), [-1.0, -1.0], old, [1.0, -2.0])
    assert total == pytest.approx(-(2.0 - 3.0)) and grad == pytest.approx([-2.0, 3.0])
    assert sums["importance_share"] == 1 and "clip_share" not in sums


def over_pairs(x: torch.Tensor) -> torch.Tensor:
    """Sums over tokens 0 and 1, and over token 2."""
    return torch.stack([x[0] + x[1], x[0] + x[1], x[2]])


def test_importance_weights_of_sequences_by_hand():
    """Ratios 4 and 1 in one sequence, 1.5 in another: products 4 and 1.5, geometric means 2 and 1.5."""
    old = [-1.0 - math.log(4), -1.0, -1.0 - math.log(1.5)]
    by_hand = {"sequence": [3.0, 3.0, 1.5], "sequence_mean": [2.0, 2.0, 1.5]}
    for level, weights in by_hand.items():
        config = RLOOConfig(importance_cap=3.0, importance_level=level)
        total, grad, _ = loss_of(config, [-1.0] * 3, old, [1.0, 1.0, 1.0], over_sequence=over_pairs)
        assert total == pytest.approx(-sum(weights)) and grad == pytest.approx([-weight for weight in weights])
    masked = GRPOConfig(importance_cap=3.0, importance_outside="mask", importance_level="sequence")
    total, grad, sums = loss_of(masked, [-1.0] * 3, old, [1.0, -1.0, -1.0], over_sequence=over_pairs)
    assert total == pytest.approx(1.5) and grad == pytest.approx([0.0, 0.0, 1.5]) and sums["importance_share"] == 2


def test_masked_tokens_contribute_nothing_even_where_their_ratio_is_infinite():
    config = GRPOConfig(importance_floor=0.5, importance_cap=2.0, importance_outside="mask")
    old = [-2000.0, -1.0 - math.log(1.5), -1.0 + math.log(4), -1.0]
    total, grad, sums = loss_of(config, [-1.0] * 4, old, [-1.0, -1.0, 1.0, 1.0])
    assert total == pytest.approx(1.5 - 1.0) and grad == pytest.approx([0.0, 1.5, 0.0, -1.0]) and sums["importance_share"] == 2


def test_divergence_from_the_reference_by_hand():
    """log(p / reference) = ln 2: k1 = ln 2, k2 = (ln 2)^2 / 2, k3 = 1/2 - 1 + ln 2; gradients ln 2, ln 2, 1/2."""
    ln2 = math.log(2)
    values = {"k1": (ln2, ln2), "k2": (ln2**2 / 2, ln2), "k3": (ln2 - 0.5, 0.5)}
    for estimator, (value, slope) in values.items():
        config = GRPOConfig(kl_coefficient=0.1, kl_estimator=estimator)
        total, grad, sums = loss_of(config, [-1.0], [-1.0], [0.0], [2.0], reference_log_probs=[-1.0 - ln2])
        assert total == pytest.approx(0.2 * value) and grad[0] == pytest.approx(0.2 * slope)
        assert sums["reference_kl"] == pytest.approx(value)
    assert current().build(config).needs_reference and not current().build(GRPOConfig()).needs_reference


def test_entropy_is_added_to_the_objective():
    """Two tokens of weights 2 and 1 and entropies 0.5 and 0.25, of which 0.1 times the weighted sum, 1.25, is taken from the loss."""
    entropy = torch.tensor([0.5, 0.25], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    extra = {"old_log_probs": x.detach(), "advantages": torch.tensor([1.0, -2.0]), "weights": torch.tensor([2.0, 1.0]), "entropy": entropy}
    plain, _ = current().build(GRPOConfig()).loss(x, extra)
    total, _ = current().build(GRPOConfig(entropy_coefficient=0.1)).loss(x, extra)
    assert (plain - total).item() == pytest.approx(0.125)
    of_entropy, of_x, of_x_plain = *torch.autograd.grad(total, (entropy, x)), torch.autograd.grad(plain, x)[0]
    assert of_entropy.tolist() == pytest.approx([-0.2, -0.1]) and torch.equal(of_x, of_x_plain)
    assert not torch.autograd.grad(current().build(GRPOConfig()).loss(x, extra)[0], entropy, allow_unused=True)[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"entropy_coefficient": -0.5}, "algorithm.entropy_coefficient is -0.5"),
        ({"clip_low": 1.5}, "algorithm.clip_low is 1.5; it must be from 0 to 1, or none"),
        ({"kl_coefficient": -1.0}, "algorithm.kl_coefficient is -1.0"),
        ({"kl_estimator": "k4"}, "algorithm.kl_estimator is 'k4'"),
        ({"importance_cap": 2.0}, "takes the place of clipping"),
        ({"importance_floor": 0.1}, "importance_floor is for importance_outside=mask"),
        ({"importance_level": "tokens"}, "importance_level is 'tokens'"),
        ({"importance_outside": "mask", "importance_floor": 3.0, "importance_cap": 2.0}, "everything would be left out"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        GRPOConfig(**fields)


# ---------------------------------------------------------------- the loss on batches


class Head:
    """A model of which only the head is asked."""

    def __init__(self, vocabulary: int = 11, dim: int = 6) -> None:
        generator = torch.Generator().manual_seed(0)
        self.head_weight_VD = torch.randn(vocabulary, dim, generator=generator).requires_grad_()


def rollouts(labels: list[list[int]], **changes: Any) -> Batch:
    labels_BS = torch.tensor(labels)
    rows, tokens = labels_BS.shape
    trained_BS = labels_BS != IGNORE
    zeros = torch.zeros(rows, tokens)
    extra = {
        "old_log_probs_BS": zeros, "advantages_BS": torch.ones(rows, tokens) * trained_BS, "weights_BS": torch.ones(rows, tokens) * trained_BS,
        "versions_BS": torch.where(trained_BS, 3, -1).to(torch.int32), "count": 2, "version": 3, **changes,
    }  # fmt: skip
    lengths = ((tokens,),) * rows
    return Batch(
        labels_BS.clamp_min(0),
        labels_BS,
        torch.arange(tokens).expand(rows, -1),
        torch.zeros(rows, tokens, dtype=torch.int32),
        lengths,
        extra=extra,
    )


def hidden_of(rows: int, tokens: int, dim: int = 6) -> torch.Tensor:
    return torch.randn(rows, tokens, dim, generator=torch.Generator().manual_seed(1)).requires_grad_()


def log_probs(model: Head, hidden_BSD: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """As the trainer has them: 0 where there is none."""
    log_p = torch.nn.functional.linear(hidden_BSD, model.head_weight_VD).float().log_softmax(-1)
    return log_p.gather(-1, labels_BS.clamp_min(0)[..., None]).squeeze(-1).where(labels_BS != IGNORE, 0.0).detach()


LABELS = [[IGNORE, 3, 4, IGNORE], [5, IGNORE, IGNORE, 10]]


def trainers_own(loss: PolicyLoss, model: Head, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[B, S]: what the loss itself computes for the trained tokens."""
    from intarsia_rl.algorithms.policy import trained_log_probs

    where_N = (batch.labels_BS != IGNORE).flatten().nonzero().squeeze(1)
    found = torch.zeros(batch.labels_BS.numel())
    found[where_N] = trained_log_probs(model, hidden, batch.labels_BS, where_N, 1024)[0].detach()
    return found.view(batch.labels_BS.shape)


@pytest.mark.parametrize("config", ALGORITHMS, ids=lambda config: type(config).__name__)
def test_where_trainer_and_generator_agree_every_ratio_is_exactly_one(config):
    model, hidden, loss = Head(), hidden_of(2, 4), build(PolicyLossConfig(algorithm=config))
    batch = rollouts(LABELS)
    batch.extra["old_log_probs_BS"] = trainers_own(loss, model, hidden, batch)
    result = loss(model, hidden, batch)
    assert result.sums["ratio_mean"].item() == 4.0 and result.sums["kl"].item() == 0.0
    assert loss.gap is not None and loss.gap.item() == 0.0 and int(loss.gap_tokens) == 4
    assert result.total.item() == -4.0  # advantage 1, weight 1, ratio 1: exactly


def test_prompt_tokens_contribute_exactly_nothing():
    model, hidden, loss = Head(), hidden_of(2, 4), build(PolicyLossConfig(algorithm=GRPOConfig()))
    batch = rollouts(LABELS)
    batch.extra["old_log_probs_BS"] = log_probs(model, hidden, batch.labels_BS)
    loss(model, hidden, batch).total.backward()
    assert hidden.grad is not None
    ignored_BS = batch.labels_BS == IGNORE
    assert not hidden.grad[ignored_BS].any() and bool(hidden.grad[~ignored_BS].any(-1).all())
    # Whatever stands there: not even numbers that are none reach anything.
    wild = hidden.detach().clone()
    wild[ignored_BS] = math.nan
    for name in ("old_log_probs_BS", "advantages_BS", "weights_BS"):
        batch.extra[name] = batch.extra[name].masked_fill(ignored_BS, math.nan)
    again = loss(model, wild.requires_grad_(), batch)
    again.total.backward()
    assert math.isfinite(again.total.item()) and torch.equal(wild.grad, hidden.grad)


def test_a_batch_with_nothing_to_train_on_gives_zero_with_a_gradient():
    model, hidden, loss = Head(), hidden_of(2, 4), build(PolicyLossConfig(algorithm=GRPOConfig()))
    result = loss(model, hidden, rollouts([[IGNORE] * 4] * 2, count=0))
    result.total.backward()
    assert result.total.item() == 0.0 and not hidden.grad.any() and not model.head_weight_VD.grad.any()
    assert {name: value.item() for name, value in result.sums.items()} == dict.fromkeys(result.sums, 0.0)
    assert loss.gap.item() == 0.0 and int(loss.gap_tokens) == 0


@pytest.mark.parametrize("config", ALGORITHMS, ids=lambda config: type(config).__name__)
def test_a_group_without_an_advantage_moves_nothing(config):
    model, hidden, loss = Head(), hidden_of(2, 4), build(PolicyLossConfig(algorithm=config))
    batch = rollouts(LABELS, advantages_BS=torch.zeros(2, 4), old_log_probs_BS=torch.full((2, 4), -2.0))
    loss(model, hidden, batch).total.backward()
    assert not hidden.grad.any() and not model.head_weight_VD.grad.any()


def test_the_gap_is_of_this_version_and_of_audited_tokens():
    model, hidden, loss = Head(), hidden_of(2, 4), build(PolicyLossConfig(algorithm=GRPOConfig()))
    batch = rollouts(LABELS, versions_BS=torch.tensor([[-1, 3, 2, -1], [2, -1, -1, 2]], dtype=torch.int32))
    own = trainers_own(loss, model, hidden, batch)
    batch.extra["old_log_probs_BS"] = own + torch.tensor([[0.0, 0.25, 9.0, 0.0], [9.0, 0.0, 0.0, 9.0]])
    loss(model, hidden, batch)
    assert loss.gap.item() == pytest.approx(0.25, abs=1e-6) and int(loss.gap_tokens) == 1
    audit = torch.full((2, 4), math.nan)
    audit[1, 3] = own[1, 3] - 0.5
    batch.extra["audit_log_probs_BS"] = audit
    loss(model, hidden, batch)  # of all micro-batches of a step
    assert loss.gap.item() == pytest.approx(0.5, abs=1e-6) and int(loss.gap_tokens) == 3
    loss.reset_gap()
    assert loss.gap is None


def test_the_trainers_division_by_tokens_makes_the_algorithms_divisor_and_means_over_tokens():
    model, hidden, loss = Head(), hidden_of(2, 4), build(PolicyLossConfig(algorithm=GRPOConfig()))
    batch = rollouts(LABELS, per_token=2 / 4)  # a count of 2 in the step, 4 trained tokens
    batch.extra["old_log_probs_BS"] = trainers_own(loss, model, hidden, batch)
    result = loss(model, hidden, batch)
    assert loss.count(batch) == 4
    assert result.total.item() / 4 == -4.0 / 2 and result.sums["ratio_mean"].item() / 4 == 1.0
    log_p = torch.nn.functional.linear(hidden, model.head_weight_VD).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)[batch.labels_BS != IGNORE].mean()
    assert result.sums["entropy"].item() / 4 == pytest.approx(entropy.item(), rel=1e-6)
    batch.extra.update(per_token=0.0, weights_BS=torch.zeros(2, 4))  # nothing counts
    assert loss(model, hidden, batch).total.item() == 0.0


def test_only_the_next_token_of_models_that_predict_further_ahead_counts():
    model, hidden, loss = Head(), hidden_of(2, 4), build(PolicyLossConfig(algorithm=GRPOConfig()))
    batch = rollouts(LABELS)
    assert loss(model, (hidden, hidden * 2), batch).total.item() == loss(model, hidden, batch).total.item()


def test_sequences_are_documents_of_rows():
    from intarsia_rl.algorithms.policy import over_sequences

    batch = Batch(
        torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[1, IGNORE, 1, 1], [1, 1, 1, 1]]), torch.zeros(2, 4), torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]]), ((2, 2), (1, 1, 2))
    )  # fmt: skip
    where_N = torch.tensor([0, 2, 3, 4, 5, 6, 7])
    summed = over_sequences(batch, torch.zeros(2, 4, 1), where_N)
    assert summed(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])).tolist() == [1.0, 6.0, 6.0, 8.0, 16.0, 96.0, 96.0]


def test_what_the_loss_needs_is_said():
    model, hidden, loss = Head(), hidden_of(2, 4), build(PolicyLossConfig(algorithm=GRPOConfig(kl_coefficient=0.1)))
    with pytest.raises(PluginError, match="without reference_log_probs_BS"):
        loss(model, hidden, rollouts(LABELS))
    plain = Batch(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), ((2,),))
    with pytest.raises(UsageError, match=r"Set data\.loader=rollouts"):
        loss.count(plain)
    with pytest.raises(UsageError, match=r"give them loss=cross_entropy"):
        loss(model, hidden, plain)
    assert loss.count(rollouts(LABELS)) == 4
    cut: Any = SimpleNamespace(cross_entropy=None, head_weight_VD=model.head_weight_VD)
    with pytest.raises(UsageError, match="no `token_log_probs`"):
        loss(cut, hidden, rollouts(LABELS, reference_log_probs_BS=torch.zeros(2, 4)))


def test_the_controllers_side_imports_no_torch():
    modules = "intarsia_rl.algorithms.grpo, intarsia_rl.algorithms.rloo, intarsia_rl.preferences.config, intarsia_rl.plugin"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
