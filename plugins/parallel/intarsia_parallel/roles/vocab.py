"""vocab: an embedding or an output projection whose rows (the vocabulary) are shared out.

Embedding: every rank has all ids, looks its own rows up, and the results, 0 for other ranks' ids, are summed and cut along the sequence. Output projection: the
cross-entropy is `vocab_cross_entropy`, tokens' log-probabilities are `vocab_token_log_probs`, and `project` gives every rank all logits of all tokens. With `whole` every rank has the whole vocabulary and works on
its own tokens. A tied pair has the role twice, with the same settings.

Gradients: the own rows' are whole in what this rank's tokens say, no sum along tp; with `whole`, partial sums along tp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from intarsia import ops
from intarsia.comm import Communicator
from intarsia.errors import UsageError
from intarsia.ops.operator import find
from torch import Tensor, nn

from intarsia_parallel import tokens
from intarsia_parallel.collectives import even_counts, gather, gather_replicated, own_part, scatter_sum, sum_forward
from intarsia_parallel.config import VocabConfig
from intarsia_parallel.cross_entropy import labels_of_parts, own_labels, vocab_cross_entropy
from intarsia_parallel.cuts import EvenCut
from intarsia_parallel.log_probs import Pair, in_order_of_rows, vocab_token_log_probs
from intarsia_parallel.roles.common import TENSOR, Groups, ParameterCuts, expect_shares, wrap

CrossEntropy = Callable[..., Tensor]
LogProbs = Callable[..., Pair]


class Vocab:
    """See the module."""

    def __init__(self, config: VocabConfig) -> None:
        self.whole = config.whole
        # Rows of the whole weight by module name: noted before it is cut.
        self._rows: dict[str, int] = {}

    def check(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> None:
        """It has a weight [V, D], no bias, and every rank gets rows."""
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
            raise UsageError(
                f"{name} has the role vocab, which is for modules with a weight [vocabulary, dim]; {type(module).__name__} has none."
            )
        if getattr(module, "bias", None) is not None:
            raise UsageError(f"{name} has the role vocab and a bias, of which the cross-entropy knows nothing. Build it without.")
        if not self.whole:
            expect_shares(name, "ids", weight.shape[0], 1, sizes[TENSOR])

    def cut(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> ParameterCuts:
        """The weight's rows."""
        self._rows[name] = module.get_parameter("weight").shape[0]
        return {} if self.whole else {"weight": (TENSOR, EvenCut(0))}

    def apply(self, name: str, module: nn.Module, groups: Groups) -> None:
        """Look up, or project, with what is here of the vocabulary."""
        comm = groups(TENSOR)
        if comm.size == 1:
            return
        if isinstance(module, nn.Linear):
            counts = even_counts(self._rows[name], comm.size)
            wrap(module, _project_own if self.whole else _project, comm, name, *(() if self.whole else (counts,)))
        elif self.whole:
            wrap(module, _look_up_own, comm)
        else:
            wrap(module, _look_up, comm, name, self._own_rows(name, comm))

    def cross_entropy(self, name: str, module: nn.Module, groups: Groups) -> CrossEntropy:
        """What the model's `cross_entropy` becomes where `module` holds its head weight: arguments as of `intarsia.ops.cross_entropy`, hidden states of this rank's part of
        the sequence, labels of all tokens."""
        comm = groups(TENSOR)
        if self.whole:
            return functools.partial(_cross_entropy_of_own, comm, name)
        return functools.partial(_cross_entropy, comm, name, self._own_rows(name, comm))

    def token_log_probs(self, name: str, module: nn.Module, groups: Groups) -> LogProbs:
        """What the model's `token_log_probs` becomes: arguments as of the operator of this name, of which the hidden states are this rank's part of the sequence; results of all tokens,
        *replicated*."""
        comm = groups(TENSOR)
        if self.whole:
            return functools.partial(_log_probs_of_own, comm, name)
        return functools.partial(_log_probs, comm, name, self._own_rows(name, comm))

    def _own_rows(self, name: str, comm: Communicator) -> tuple[int, int]:
        counts = even_counts(self._rows[name], comm.size)
        return sum(counts[: comm.rank]), counts[comm.rank]


def _look_up(comm: Communicator, name: str, rows: tuple[int, int], forward: Callable[[Tensor], Tensor], tokens_BS: Tensor) -> Tensor:
    begin, count = rows
    elsewhere_BS = (tokens_BS < begin) | (tokens_BS >= begin + count)
    x_BSD = forward((tokens_BS - begin).masked_fill(elsewhere_BS, 0)).masked_fill(elsewhere_BS[..., None], 0.0)
    return scatter_sum(x_BSD, 1, even_counts(tokens_BS.shape[1], comm.size), comm, name)


def _look_up_own(comm: Communicator, forward: Callable[[Tensor], Tensor], tokens_BS: Tensor) -> Tensor:
    return forward(own_part(tokens_BS, 1, even_counts(tokens_BS.shape[1], comm.size), comm))


def _project(comm: Communicator, name: str, counts: list[int], forward: Callable[[Tensor], Tensor], hidden_BSD: Tensor) -> Tensor:
    hidden_BSD = gather(hidden_BSD, 1, tokens.checked_counts(hidden_BSD, 1, comm, name), comm, name)
    return gather_replicated(forward(hidden_BSD), -1, counts, comm, f"{name}, logits")


def _project_own(comm: Communicator, name: str, forward: Callable[[Tensor], Tensor], hidden_BSD: Tensor) -> Tensor:
    parts = tokens.checked_counts(hidden_BSD, 1, comm, name)
    return gather_replicated(forward(hidden_BSD), 1, parts, comm, f"{name}, logits")


@torch.compiler.disable
def _cross_entropy(
    comm: Communicator,
    name: str,
    rows: tuple[int, int],
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    *,
    softcap: float | None = None,
    chunk: int = 1024,
) -> Tensor:
    parts, labels_N = labels_of_parts(hidden_ND, labels_N, comm, name)
    return vocab_cross_entropy(hidden_ND, weight_VD, labels_N, rows, parts, comm, softcap=softcap, chunk=chunk, what=name)


@torch.compiler.disable
def _cross_entropy_of_own(comm: Communicator, name: str, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, **settings: Any) -> Tensor:
    own = ops.cross_entropy(hidden_ND, weight_VD, own_labels(hidden_ND, labels_N, comm, name), **settings)
    return sum_forward(own, comm, f"{name}, loss")


@torch.compiler.disable
def _log_probs(
    comm: Communicator,
    name: str,
    rows: tuple[int, int],
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens_N: Tensor,
    *,
    softcap: float | None = None,
    chunk: int = 1024,
) -> Pair:
    parts, ordered_N = labels_of_parts(hidden_ND, tokens_N, comm, name)
    found = vocab_token_log_probs(hidden_ND, weight_VD, ordered_N, rows, parts, comm, softcap=softcap, chunk=chunk, what=name)
    counts = tokens.counts(comm)
    return in_order_of_rows(found[0], counts), in_order_of_rows(found[1], counts)


@torch.compiler.disable
def _log_probs_of_own(comm: Communicator, name: str, hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor, **settings: Any) -> Pair:
    own_N = own_labels(hidden_ND, tokens_N, comm, name)
    counts = tokens.counts(comm)
    own = find("token_log_probs")(hidden_ND, weight_VD, own_N, **settings)
    rows = tokens_N.numel() // max(1, sum(counts))
    whole = [gather_replicated(each.view(rows, counts[comm.rank]), 1, counts, comm, f"{name}, log-probabilities").flatten() for each in own]
    return whole[0], whole[1]


def build(config: VocabConfig) -> Vocab:
    """The entry's target."""
    return Vocab(config)
