"""Rows as a batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from intarsia.contracts import Batch
from intarsia_data.batches import places
from intarsia_models_common.vision.base import check_order

from intarsia_multimodal.making import Row


def stack(rows: Sequence[Row], samples: Sequence[int], merge: int, patches: Callable[[], torch.Tensor] | None = None) -> Batch:
    """The rows as one Batch. `extra` holds `positions_3BS`, `visual_BS` (numbers of features, counted over the batch), `patches_NC` (what makes them), `grids`, `bytes` where they are known,
    `padding_BS` where tokens only fill rows, and `bad_media`, what is wrong with documents that are padding instead. `merge` patches on a side make one feature. `patches` makes those of all rows; None: the rows have
    theirs.

    Errors: PluginError unless the rows have a place for each feature of their grids, in order. It is looked at here, on the host: a model does not wait for a device to do so.
    """
    size = len(rows[0].tokens_S)
    positions_BS, documents_BS = places([row.lengths for row in rows], size)
    visual = numpy.empty((len(rows), size), numpy.int64)
    features = 0
    for number, row in enumerate(rows):
        seen = row.visual_S >= 0
        visual[number] = numpy.where(seen, row.visual_S + features, -1)
        features += int(seen.sum())
    places_BS, grids = torch.from_numpy(visual), tuple(grid for row in rows for grid in row.grids)
    check_order(places_BS[places_BS >= 0], sum(math.prod(grid) for grid in grids) // merge**2)
    extra: dict[str, Any] = {
        "positions_3BS": torch.from_numpy(numpy.stack([row.positions_3S for row in rows], axis=1)),
        "visual_BS": places_BS,
        "patches_NC": patches or functools.partial(joined, [row.patches_NC for row in rows]),
        "grids": grids,
        "bad_media": tuple(what for row in rows for what in row.bad),
    }
    padding_BS = numpy.stack([row.padding_S for row in rows])
    if padding_BS.any():
        extra["padding_BS"] = torch.from_numpy(padding_BS)
    sizes = [row.bytes for row in rows if row.bytes is not None]
    if len(sizes) == len(rows):
        extra["bytes"] = sum(sizes)
    return Batch(
        tokens_BS=torch.from_numpy(numpy.stack([row.tokens_S for row in rows])),
        labels_BS=torch.from_numpy(numpy.stack([row.labels_S for row in rows])),
        positions_BS=positions_BS,
        documents_BS=documents_BS,
        lengths=tuple(row.lengths for row in rows),
        samples=tuple(samples),
        extra=extra,
    )


def joined(patches: Sequence[numpy.ndarray]) -> torch.Tensor:
    """The patches of a micro-batch, one behind the other; made when its model looks at them, so that there is a copy of one micro-batch's at a time."""
    return torch.from_numpy(numpy.concatenate(patches))
