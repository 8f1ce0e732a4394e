"""The trainer's own path with the loss `policy`: batches of documents that get, by a rule on tokens alone, what rollouts carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from intarsia.contracts import IGNORE, Batch
from torch import Tensor


def carried(batch: Batch, layers: int, top_k: int, experts: int) -> Batch:
    """The batch with what the loss reads, and routes for `layers` layers (0: none). What a token carries follows from it and its neighbours in the document."""
    tokens_BS, trained_BS = batch.tokens_BS, batch.labels_BS != IGNORE
    number_BS = tokens_BS * 7 + batch.positions_BS * 3
    # A document's first token says what the document is worth.
    first_BS = tokens_BS.gather(1, torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS) - batch.positions_BS)
    advantages_BS = torch.cos(first_BS * 1.7 + batch.documents_BS).float()

    def wave(scale: float) -> Tensor:
        return (-5.8 + 2 * torch.cos(number_BS * scale)).float().where(trained_BS, 0.0)

    extra: dict[str, Any] = {
        "old_log_probs_BS": wave(0.3),
        "reference_log_probs_BS": wave(0.7),
        "advantages_BS": advantages_BS.where(trained_BS, 0.0),
        "weights_BS": (1.0 / (1 + first_BS % 3)).float().where(trained_BS, 0.0),
        "versions_BS": torch.where(trained_BS, 0, -1).to(torch.int32),
        "version": 0,
    }
    if layers:
        # Distinct within a token; every third token is the router's own choice.
        start_BSL = number_BS[..., None] + torch.arange(layers)
        routes_BSLK = (start_BSL[..., None] + torch.arange(top_k) * 3) % experts
        extra["routes_BSLK"] = routes_BSLK.where((number_BS % 3 != 0)[..., None, None], -1).to(torch.int16)
    return dataclasses.replace(batch, extra={**batch.extra, **extra})


def run_policy(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A job of `_meshes`; `routes` are its layers of experts."""
    from _meshes import run_job
    from intarsia_data.loader import Loader

    real = Loader.next_step

    def next_step(self: Loader) -> list[Batch] | None:
        batches = real(self)
        return None if batches is None else [carried(batch, job["routes"], 2, 8) for batch in batches]

    Loader.next_step = next_step  # type: ignore[method-assign]
    try:
        return run_job(job, folder)
    finally:
        Loader.next_step = real  # type: ignore[method-assign]
