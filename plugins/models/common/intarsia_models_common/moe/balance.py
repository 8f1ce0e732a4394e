"""Losses that keep experts busy alike, and what is counted for it. N tokens, K experts of a token, E experts, B rows, S tokens of a row, Q sequences.

All losses are sums over tokens: the trainer divides by the step's number of tokens. With the fraction f_e of pairs that chose e and the mean probability P_e,

    balance    T E sum over e of f_e P_e           over all tokens T of the micro-batch on all ranks (Switch, arXiv 2101.03961)
    sequence   the same within each sequence       (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20)
    z          sum of logsumexp(logits)^2          (ST-MoE, arXiv 2202.08906)

f has no gradient, so that only its counts cross ranks; each rank adds the share of its own tokens' probabilities. Tokens of padding are left out of all of them. The loss of all layers
together is `joint`.
"""

from __future__ import annotations

import dataclasses

import torch
from intarsia import logical
from torch import Tensor

from intarsia_models_common.moe.operators import EXPERT_COUNTS

FURTHER = 3
"""What is counted beside the load of each expert: tokens, the sum of their entropies (nats), dropped pairs."""


@dataclasses.dataclass(frozen=True)
class Sequences:
    """How the N tokens of a call lie: `rows` of equal length, one after the other; `documents_BS` numbers documents within each row (None: each row is one); `padding_BS` says which
    tokens are padding (None: none)."""

    rows: int
    documents_BS: Tensor | None = None
    padding_BS: Tensor | None = None

    @property
    def keep_N(self) -> Tensor | None:
        """1 for tokens that count, 0 for padding, float32; None: all count."""
        return None if self.padding_BS is None else (~self.padding_BS).flatten().float()


def is_recomputed() -> bool:
    """Whether this forward runs within a backward pass, for the second time."""
    return torch._C._current_graph_task_id() != -1


def count(counters: Tensor, counts_E: Tensor, scores_NE: Tensor, dropped: Tensor | None) -> None:
    """Add to `counters` (float64, [E + FURTHER]) unless this is a recomputation; `scores_NE` without gradient."""
    # Opaque to a compiler, which would decide that when it compiles. Where nothing traces or watches, the dispatcher's way to it takes the host longer than the counting.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        _count_opaque(counters, counts_E, scores_NE, dropped)
    else:
        _count(counters, counts_E, scores_NE, dropped)


def _count(counters: Tensor, counts_E: Tensor, scores_NE: Tensor, dropped: Tensor | None) -> None:
    if not is_recomputed():
        counters += EXPERT_COUNTS(counts_E, scores_NE, dropped)


_count_opaque = torch.library.custom_op("intarsia::count_experts", mutates_args=("counters",))(_count)


@_count_opaque.register_fake
def _(counters: Tensor, counts_E: Tensor, scores_NE: Tensor, dropped: Tensor | None) -> None:
    return None


def z_loss(logits_NE: Tensor, keep_N: Tensor | None = None) -> Tensor:
    """The sum over tokens of logsumexp(logits)^2."""
    squares_N = torch.logsumexp(logits_NE, -1).square()
    return squares_N.sum() if keep_N is None else (squares_N * keep_N).sum()


def statistics(probabilities_NE: Tensor, experts_NK: Tensor, keep_N: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of each expert, the sum of its probabilities (which are 0 for padding), and how many tokens count."""
    k = experts_NK.shape[1]
    each_N = _each(probabilities_NE, keep_N)
    pairs_E = probabilities_NE.new_zeros(probabilities_NE.shape[1])
    pairs_E = pairs_E.scatter_add_(0, experts_NK.flatten(), each_N[:, None].expand(-1, k).flatten())
    return pairs_E, probabilities_NE.sum(0), each_N.sum()


def balance_loss(probabilities_NE: Tensor, experts_NK: Tensor, keep_N: Tensor | None = None) -> Tensor:
    """This rank's share of T E sum f_e P_e, T being the tokens of the micro-batch on all ranks that share the data."""
    pairs_E, mass_E, tokens = statistics(probabilities_NE, experts_NK, keep_N)
    counts = logical.sum(torch.cat([pairs_E, tokens.view(1)]).detach(), ("sequence", "batch"))
    fraction_E = counts[:-1] / (counts[-1].clamp_min(1) * experts_NK.shape[1])
    return pairs_E.shape[0] * (mass_E * fraction_E).sum()


def sequence_loss(probabilities_NE: Tensor, experts_NK: Tensor, where: Sequences) -> Tensor:
    """This rank's share of the sum over sequences of T_q E sum f_qe P_qe; a sequence may be cut over ranks of the axis "sequence"."""
    experts, k = probabilities_NE.shape[1], experts_NK.shape[1]
    which_N, sequences = _sequences(where, probabilities_NE)
    index = (which_N[:, None] * experts + experts_NK).flatten()
    each_NK = _each(probabilities_NE, where.keep_N)[:, None].expand(-1, k).flatten()
    counts_QE = probabilities_NE.new_zeros(sequences * experts).scatter_add_(0, index, each_NK).view(sequences, experts)
    counts_QE = logical.sum(counts_QE, ("sequence",))
    tokens_Q1 = (counts_QE.sum(-1, keepdim=True) / k).clamp_min(1)
    mass_QE = probabilities_NE.new_zeros(sequences, experts).index_add(0, which_N, probabilities_NE)
    return experts * (mass_QE * (counts_QE / (tokens_Q1 * k))).sum()


def _each(like_NE: Tensor, keep_N: Tensor | None) -> Tensor:
    """What each token counts, in the dtype of `like_NE`."""
    return like_NE.new_ones(()).expand(like_NE.shape[0]) if keep_N is None else keep_N.to(like_NE.dtype)


def _sequences(where: Sequences, like_NE: Tensor) -> tuple[Tensor, int]:
    """The number of each token's sequence, and how many numbers there are: the same on every rank that has a part of them."""
    rows, tokens = where.rows, like_NE.shape[0] // max(1, where.rows)
    row_N = torch.arange(rows, device=like_NE.device).repeat_interleave(tokens)
    if where.documents_BS is None:
        return row_N, rows
    documents_BS = where.documents_BS.long()
    # A bound that all parts of a row agree on: the sum of their largest numbers.
    largest = documents_BS.amax() + 1 if documents_BS.numel() else documents_BS.new_zeros(())
    bound = int(logical.sum(largest.to(torch.float32), ("sequence",)))
    return row_N * bound + documents_BS.flatten(), rows * bound
