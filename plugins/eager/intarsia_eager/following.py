"""The tokens further on, for models that predict further ahead than the next token. B rows, S tokens, K depths."""

from __future__ import annotations

import dataclasses

import torch
from intarsia.contracts import IGNORE, Batch
from torch import Tensor

FOLLOWING, FOLLOWING_LABELS = "following_BSK", "following_labels_BSK"


def with_following(batch: Batch, depth: int) -> Batch:
    """The batch with two further tensors in `extra`, both int64 and made of the whole rows (so before they are cut over ranks): Stability: provisional.

    `following_BSK`: at [b, i, k - 1] the token i + k of the row, 0 where the document of token i does not reach that far;
    `following_labels_BSK`: the label of depth k, which is the label of token i + k, IGNORE where the document does not reach that far.
    `depth` 0 leaves the batch as it is, and so does one that has them already.
    """
    if depth == 0 or FOLLOWING in batch.extra:
        return batch
    tokens, labels = zip(*(_ahead(batch, k) for k in range(1, depth + 1)), strict=True)
    return dataclasses.replace(batch, extra={**batch.extra, FOLLOWING: torch.stack(tokens, -1), FOLLOWING_LABELS: torch.stack(labels, -1)})


def _ahead(batch: Batch, k: int) -> tuple[Tensor, Tensor]:
    tokens_BS, labels_BS = torch.zeros_like(batch.tokens_BS), torch.full_like(batch.labels_BS, IGNORE)
    same_BS = batch.documents_BS[:, k:] == batch.documents_BS[:, :-k]
    tokens_BS[:, :-k] = batch.tokens_BS[:, k:] * same_BS
    labels_BS[:, :-k] = torch.where(same_BS, batch.labels_BS[:, k:], IGNORE)
    return tokens_BS, labels_BS
