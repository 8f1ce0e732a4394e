"""What a run does at its events with media that could not be used. Called on every rank."""

from __future__ import annotations

import torch
from intarsia.contracts import Run
from intarsia.train.built import DATA_AXES

NAMED = 20
"""How many documents of each rank an event names."""


def record_skipped(run: Run, step: int) -> None:
    """Write the event `bad_media`: how many documents of this step were padding instead, over all ranks, and which. A collective."""
    loader = run.parts["data"]
    mine = loader.take_skipped()
    comm = run.parts["mesh"].comm(*DATA_AXES)
    count = int(comm.all_reduce(torch.tensor([len(mine)], dtype=torch.int64), what="documents with bad media"))
    if count:
        named = [what for each in comm.gather_json(mine[:NAMED], what="documents with bad media") for what in each]
        run.record("bad_media", step=step + 1, count=count, documents=named)
