"""The tokens further on, for models that predict further ahead than the next token. B rows, S tokens, K depths."""

from __future__ import annotations

import dataclasses

import torch
from intarsia.contracts import IGNORE, Batch
from torch import Tensor

FOLLOWING, FOLLOWING_LABELS, FOLLOWING_VISUAL = "following_BSK", "following_labels_BSK", "following_visual_BSK"


def with_following(batch: Batch, depth: int) -> Batch:
    """The batch with further tensors in `extra`, all int64 and made of the whole rows (so before they are cut over ranks): Stability: provisional.

    `following_BSK`: at [b, i, k - 1] the token i + k of the row, 0 where the document of token i does not reach that far;
    `following_labels_BSK`: the label of depth k, which is the label of token i + k, IGNORE where the document does not reach that far;
    `following_visual_BSK`, where the batch has `visual_BS`: which feature stands in the place of the token i + k, -1 where none does.
    `depth` 0 leaves the batch as it is, and so does one that has them already.
    """
    if depth == 0 or FOLLOWING in batch.extra:
        return batch
    given = {FOLLOWING: (batch.tokens_BS, 0), FOLLOWING_LABELS: (batch.labels_BS, IGNORE)}
    if "visual_BS" in batch.extra:
        given[FOLLOWING_VISUAL] = (batch.extra["visual_BS"], -1)
    ahead = {
        name: torch.stack([_ahead(x_BS, batch.documents_BS, k, none) for k in range(1, depth + 1)], -1)
        for name, (x_BS, none) in given.items()
    }
    return dataclasses.replace(batch, extra={**batch.extra, **ahead})


def _ahead(x_BS: Tensor, documents_BS: Tensor, k: int, none: int) -> Tensor:
    """What stands k places further on in the same document, `none` where it does not reach that far."""
    ahead_BS = torch.full_like(x_BS, none)
    ahead_BS[:, :-k] = torch.where(documents_BS[:, k:] == documents_BS[:, :-k], x_BS[:, k:], none)
    return ahead_BS
