"""The loss `policy`: an algorithm's, on the tokens that the policy generated. B rows, S tokens, N trained tokens, D model width.

log p = log_softmax(float32(hidden W^T))[token]         by the operator `token_log_probs`, for trained tokens only
total = algorithm.loss(log p, what the samples carried)  a weighted sum, which the trainer divides once by the step's count
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from intarsia import logical
from intarsia.contracts import IGNORE, Batch, LossSum, Model
from intarsia.errors import PluginError, UsageError
from intarsia.plugins import current
from torch import Tensor

from intarsia_rl.algorithms.config import PolicyLossConfig
from intarsia_rl.algorithms.operators import token_log_probs
from intarsia_rl.contracts import Algorithm

CARRIED = ("old_log_probs", "advantages", "weights", "versions")


class PolicyLoss:
    """See the module; built with an algorithm.

    Sums beside the algorithm's: `entropy`.

    `gap` is the largest difference between log-probabilities of the trainer and of a generator with the same weights that was seen since `reset_gap` (None: none was looked for), in this process's part
    of the tokens; `gap_tokens` says of how many tokens. `seen` are the micro-batches trained on since then, as this process had them: each with the places of its trained tokens among B S and their
    log-probabilities [N].
    """

    def __init__(self, algorithm: Algorithm, chunk: int = 1024) -> None:
        self.algorithm = algorithm
        self._chunk = chunk
        self.gap: Tensor | None = None
        self.gap_tokens: Tensor | None = None
        self.seen: list[tuple[Batch, Tensor, Tensor]] = []

    def __call__(self, model: Model, hidden_BSD: Tensor | tuple[Tensor, ...], batch: Batch) -> LossSum:
        """The weighted sum for one micro-batch; 0, with a gradient of 0, where no token is trained on. Of a model that predicts further ahead only the next token counts."""
        extra, where_N = self._carried(batch)
        log_probs_N, entropy_N = trained_log_probs(model, hidden_BSD, batch.labels_BS, where_N, self._chunk)
        self._compare(log_probs_N.detach(), extra, batch)
        if torch.is_grad_enabled():
            self.seen.append((batch, where_N, log_probs_N.detach()))
        if not getattr(self.algorithm, "needs_reference", False):
            extra.pop("reference_log_probs", None)
        extra["entropy"] = entropy_N
        extra["over_sequence"] = over_sequences(batch, hidden_BSD, where_N)
        total, sums = self.algorithm.loss(log_probs_N, extra)
        # A step that nothing counts in has weights of 0 only.
        total = total / (float(batch.extra.get("per_token", 1.0)) or 1.0)
        return LossSum(total, {name: value.detach() for name, value in {"entropy": entropy_N.detach().sum(), **sums}.items()})

    def count(self, batch: Batch) -> int:
        """Its trained tokens."""
        _check_rollouts(batch)
        return int((batch.labels_BS != IGNORE).sum())

    def reset_gap(self) -> None:
        """Forget the differences seen so far: a step begins."""
        self.gap = self.gap_tokens = None
        self.seen.clear()

    def _carried(self, batch: Batch) -> tuple[dict[str, Any], Tensor]:
        """What the trained tokens carried, [N] each, and which of the B S tokens they are."""
        _check_rollouts(batch)
        where_N = (batch.labels_BS != IGNORE).flatten().nonzero().squeeze(1)
        needed = (*CARRIED, "reference_log_probs") if self.algorithm.needs_reference else CARRIED
        missing = [name for name in needed if f"{name}_BS" not in batch.extra]
        if missing:
            raise PluginError(
                f"The loader gave the loss `policy` batches without {', '.join(f'{name}_BS' for name in missing)} in `extra`."
            )
        names = [name for name in (*needed, "audit_log_probs") if f"{name}_BS" in batch.extra]
        return {name: batch.extra[f"{name}_BS"].flatten()[where_N] for name in names}, where_N

    @torch.no_grad()
    def _compare(self, log_probs_N: Tensor, extra: dict[str, Any], batch: Batch) -> None:
        """Hold tokens that were generated, or scored anew, with the very weights that the trainer has now against the trainer's own numbers."""
        same_N = extra["versions"] == batch.extra.get("version", -1)
        gaps_N = (log_probs_N - extra["old_log_probs"]).abs().where(same_N, 0.0)
        audit_N = extra.pop("audit_log_probs", None)
        if audit_N is not None:
            audited_N = ~audit_N.isnan()
            gaps_N = torch.maximum(gaps_N, (log_probs_N - audit_N).abs().where(audited_N, 0.0))
            same_N = same_N | audited_N
        gap = torch.cat([gaps_N, gaps_N.new_zeros(1)]).amax()
        self.gap = gap if self.gap is None else torch.maximum(self.gap, gap)
        self.gap_tokens = same_N.sum() if self.gap_tokens is None else self.gap_tokens + same_N.sum()


def _check_rollouts(batch: Batch) -> None:
    """UsageError for a batch of documents."""
    if "weights_BS" not in batch.extra:
        raise UsageError(
            "The loss `policy` learns from rollouts, and this batch is one of documents. Set data.loader=rollouts, or another loss. `intarsia plan` and `intarsia parallel check` make "
            "documents whatever the loader: give them loss=cross_entropy, for the trainer's side without its rollouts."
        )


def trained_log_probs(
    model: Model, hidden_BSD: Tensor | tuple[Tensor, ...], labels_BS: Tensor, where_N: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) [N] of the labels at the places `where_N` of the B S tokens. Logits are made for these tokens alone, but for a head that
    is cut over ranks, whose ranks hold parts of the tokens: by the model's own `token_log_probs`."""
    hidden_BSD = hidden_BSD if isinstance(hidden_BSD, Tensor) else hidden_BSD[0]
    hidden_ND, labels_N = hidden_BSD.flatten(0, 1), labels_BS.flatten()
    own: Callable[..., tuple[Tensor, Tensor]] | None = getattr(model, "token_log_probs", None)
    if own is None and hasattr(model, "cross_entropy"):
        raise UsageError(
            f"The output projection of {type(model).__name__} is cut over ranks by a role that gives the model a cross-entropy but no `token_log_probs`. Give it the role vocab, or set mesh.tp=1."
        )
    if own is None:
        return token_log_probs(hidden_ND[where_N], model.head_weight_VD, labels_N[where_N], chunk=chunk)
    log_probs_N, entropy_N = own(hidden_ND, model.head_weight_VD, labels_N, chunk=chunk)
    return log_probs_N[where_N], entropy_N[where_N]


def copies(hidden_BSD: Tensor | tuple[Tensor, ...], labels_BS: Tensor) -> float:
    """How often each token's numbers are among those that a sum over the logical axis `sequence` adds: along tp every rank has all of them, though only a part of the hidden
    states. A collective where there are several ranks."""
    if logical.ranks(("sequence",)) == 1:
        return 1.0
    part = hidden_BSD if isinstance(hidden_BSD, Tensor) else hidden_BSD[0]
    sizes = torch.tensor([labels_BS.numel(), part.shape[0] * part.shape[1]], dtype=torch.float64, device=labels_BS.device)
    numbers, states = logical.sum(sizes, ("sequence",)).tolist()
    return float(round(numbers / states))


def over_sequences(batch: Batch, hidden_BSD: Tensor | tuple[Tensor, ...], where_N: Tensor) -> Callable[[Tensor], Tensor]:
    """A function of [N] (no gradient) to each token's sum over the trained tokens of its sequence, of which other ranks may hold parts. A collective where they do."""
    most = max((len(row) for row in batch.lengths), default=1)
    rows, tokens = batch.labels_BS.shape
    row_N = torch.arange(rows, device=where_N.device).repeat_interleave(tokens)[where_N]
    which_N = row_N * most + batch.documents_BS.flatten()[where_N].long()

    @torch.no_grad()
    def summed(x_N: Tensor) -> Tensor:
        totals = logical.sum(x_N.new_zeros(rows * most).index_add(0, which_N, x_N), ("sequence",))
        return (totals / copies(hidden_BSD, batch.labels_BS))[which_N]

    return summed


def build(config: PolicyLossConfig) -> PolicyLoss:
    """The entry's target."""
    return PolicyLoss(current().build(config.algorithm), config.chunk)
