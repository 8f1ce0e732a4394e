"""What a run does at its events with media that could not be used. Called on every rank."""

from __future__ import annotations

from typing import Any

import torch
from intarsia.contracts import Run
from intarsia.errors import DistributedError
from intarsia.mesh import AXES
from intarsia.train.built import DATA_AXES

NAMED = 20
"""How many documents of each rank an event names."""
ROW_AXES = tuple(axis for axis in AXES if axis not in DATA_AXES)
"""Along these axes ranks hold parts of the same rows."""


def record_skipped(run: Run, step: int) -> None:
    """Of what the training loader gave for `step`: see `_record`."""
    _record(run, run.parts["data"], f"Step {step}", step=step + 1, split="train")


def watch_evaluation(run: Run) -> None:
    """Have each step of an evaluation recorded likewise, before any rank computes with it: see `_record`."""
    loader = run.parts["evaluation"]
    loader.after_step_made = lambda: _record(run, loader, f"Evaluation after step {run.step}", step=run.step, split="evaluation")


def _record(run: Run, loader: Any, when: str, **facts: Any) -> None:
    """Write the event `bad_media`: how many documents of the step that the loader gave last are padding instead, over all ranks, and which. A collective.

    Errors: DistributedError where ranks that hold parts of the same rows left out different documents, since each decodes for itself: what they compute together would be wrong in silence, or never end.
    """
    mesh, mine = run.parts["mesh"], loader.take_skipped()
    sharing = mesh.comm(*ROW_AXES)
    if sharing.size > 1:
        given = sharing.gather_json([loader.rows_digest, mine[:NAMED]], what="rows with bad media")
        if len({digest for digest, _ in given}) > 1:
            raise DistributedError(differing(when, [bad for _, bad in given]))
    comm = mesh.comm(*DATA_AXES)
    count = int(comm.all_reduce(torch.tensor([len(mine)], dtype=torch.int64), what="documents with bad media"))
    if count:
        named = [what for each in comm.gather_json(mine[:NAMED], what="documents with bad media") for what in each]
        run.record("bad_media", **facts, count=count, documents=named)


def differing(when: str, bad: list[list[str]]) -> str:
    """What is to be said where ranks that share rows, in order, left out these documents."""
    everywhere = set.intersection(*map(set, bad))
    sides = [
        f"{number}: {'; '.join(what for what in each if what not in everywhere) or 'none that others have not'}"
        for number, each in enumerate(bad)
    ]
    return (
        f"{when}: ranks that hold parts of the same rows ({', '.join(ROW_AXES)}) could not decode the same documents. By their place along these axes, what each left out: "
        f"{' | '.join(sides)}. A medium that some can decode and others cannot is not the same everywhere (an URL, a folder that differs by machine, memory that ran out): "
        "make it so, or leave these documents out."
    )
