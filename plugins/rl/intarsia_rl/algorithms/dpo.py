"""The loss `dpo` (arXiv 2305.18290), on pairs of documents. B rows, S tokens, N trained tokens, P pairs of a micro-batch.

With c and r the sums of log-probabilities over the chosen and the rejected answer's tokens, c' and r' the reference's,

    m = beta ((c - c') - (r - r'));  total = sum over pairs of -log sigmoid(m)

Sums are in float64 and over pairs, whose number is the divisor: `accuracy` (m > 0), `margin` (m), `chosen_reward` and `rejected_reward` (beta (c - c'), beta (r - r')).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from intarsia import logical
from intarsia.contracts import IGNORE, Batch, LossSum, Model
from intarsia.errors import PluginError, UsageError
from torch import Tensor

from intarsia_rl.algorithms.config import DPOConfig
from intarsia_rl.algorithms.policy import copies, trained_log_probs

Recorded = list[tuple[tuple[int, ...], Tensor]]


class DPO:
    """See the module. While `recording`, it gives 0 and writes down what the reference says."""

    learns_from_pairs = True
    needs_reference = True

    def __init__(self, config: DPOConfig) -> None:
        self._config = config
        self._recorded: Recorded | None = None

    def __call__(self, model: Model, hidden_BSD: Tensor | tuple[Tensor, ...], batch: Batch) -> LossSum:
        """The sum over the micro-batch's pairs; 0, with a gradient of 0, where there is none."""
        pairs = self.count(batch)
        where_N = (batch.labels_BS != IGNORE).flatten().nonzero().squeeze(1)
        log_probs_N, _ = trained_log_probs(model, hidden_BSD, batch.labels_BS, where_N, self._config.chunk)
        # [2 P, N]: which tokens belong to which answer. A product sums in the same order every time.
        sides_N = batch.extra["sides_BS"].flatten()[where_N]
        belongs_AN = (sides_N == torch.arange(2 * pairs, device=sides_N.device)[:, None]).to(torch.float64)
        ranks = logical.ranks(("sequence",))
        times = copies(hidden_BSD, batch.labels_BS)
        sums_P2 = logical.sum((belongs_AN * log_probs_N.double()).sum(-1), ("sequence",)).view(pairs, 2) / times
        if self._recorded is not None:
            self._recorded.append((batch.extra["pairs"], sums_P2.detach()))
            return LossSum(sums_P2.detach().sum() * 0.0)
        # Every rank that holds a part of the rows has whole sums now: each gives its share of the loss, those along tp the same.
        share = times / ranks
        sizes_P2 = logical.sum(belongs_AN.sum(-1), ("sequence",)).view(pairs, 2) / times
        return self._loss(sums_P2, sizes_P2, self._reference(batch, pairs), share)

    def count(self, batch: Batch) -> int:
        """Pairs."""
        if "pairs" not in batch.extra:
            raise UsageError(
                "The loss `dpo` learns from pairs of answers, and this batch has none. Set data.loader=preferences, or another loss. `intarsia plan` and `intarsia parallel check` make "
                "single documents whatever the loader: give them loss=cross_entropy, for the same model without pairs."
            )
        return len(batch.extra["pairs"])

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recorded]:
        """Within it every micro-batch that is evaluated leaves (numbers of its pairs, [P, 2] sums of log-probabilities)."""
        recorded: Recorded = []
        self._recorded = recorded
        try:
            yield recorded
        finally:
            self._recorded = None

    def _reference(self, batch: Batch, pairs: int) -> Tensor:
        reference_P = batch.extra.get("reference_P")
        if reference_P is None:
            raise PluginError("The loader gave the loss `dpo` a batch without `reference_P` in `extra`.")
        return reference_P.view(pairs, 2)

    def _loss(self, sums_P2: Tensor, sizes_P2: Tensor, reference_P2: Tensor, share: float) -> LossSum:
        config = self._config
        rewards_P2 = config.beta * (sums_P2 - reference_P2)
        margins_P = rewards_P2[:, 0] - rewards_P2[:, 1]
        if config.kind == "hinge":
            losses_P = (1 - margins_P).clamp_min(0)
        elif config.kind == "ipo":
            losses_P = (margins_P / config.beta - 1 / (2 * config.beta)).square()
        else:
            losses_P = -(1 - config.label_smoothing) * F.logsigmoid(margins_P) - config.label_smoothing * F.logsigmoid(-margins_P)
        fixed_P2, fixed_P = rewards_P2.detach(), margins_P.detach()
        sums = {
            "accuracy": (fixed_P > 0).double().sum(),
            "margin": fixed_P.sum(),
            "chosen_reward": fixed_P2[:, 0].sum(),
            "rejected_reward": fixed_P2[:, 1].sum(),
        }
        if config.likelihood:
            likelihood_P = -sums_P2[:, 0] / sizes_P2[:, 0].clamp_min(1)
            losses_P = losses_P + config.likelihood * likelihood_P
            sums["chosen_cross_entropy"] = likelihood_P.detach().sum()
        return LossSum(losses_P.sum() * share, {name: value * share for name, value in sums.items()})


def build(config: DPOConfig) -> DPO:
    """The entry's target."""
    return DPO(config)
