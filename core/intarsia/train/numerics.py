"""Finding where a number stopped being finite, once a step has shown that one did."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from intarsia.contracts import Batch
from intarsia.errors import CheckpointError, NumericsError
from intarsia.train.built import Built


def explain_not_finite(built: Built, batches: Sequence[Batch], scale: float, loss: float, norm: float) -> NumericsError:
    """The error that ends the run, the same on every rank. A collective.

    The engine runs the step's micro-batches again and looks at every module; the first offence of the first micro-batch on the lowest rank is
    named. Where nothing recurs (a parameter's own gradient, randomness), parameters' gradients are named.
    """
    gradients = _bad_gradient(built)
    found: list[dict[str, Any]] = []
    for number, batch in enumerate(batches):
        built.sharded.zero_gradients()
        built.sharded.set_last_micro_batch(False)
        offence = built.engine.find_not_finite(built.on_device(batch), scale)
        local = {"rank": built.world.rank, "micro_batch": number, "samples": list(batch.samples), **offence} if offence else None
        found = [each for each in built.world.gather_json(local, what="non-finite modules") if each]
        if found:
            break
    if not found:
        found = [each for each in built.world.gather_json(gradients, what="non-finite gradients") if each]
    return NumericsError(_message(built, found[0] if found else None, loss, norm))


def _message(built: Built, first: dict[str, Any] | None, loss: float, norm: float) -> str:
    step = built.run.step
    parts = [f"Step {step} is not finite: loss {loss:g}, gradient norm {norm:g}."]
    if first is None:
        parts.append(f"Running its micro-batches again gave finite numbers on all {built.world.size} ranks: the fault does not repeat.")
    elif "micro_batch" in first:
        parts.append(
            f"First offending module: {first['module']}, {first['where']}, on rank {first['rank']}, in micro-batch {first['micro_batch']} "
            f"(samples {', '.join(map(str, first['samples'][:8]))}{', ...' * (len(first['samples']) > 8)})."
        )
    else:
        parts.append(
            f"First offending module: {first['module']}, gradient of its parameter {first['parameter']!r}, on rank {first['rank']}."
        )
    if first is not None and first.get("parameters"):
        parts.append(f"Its own parameters are not finite: {', '.join(first['parameters'])}.")
    with contextlib.suppress(CheckpointError):  # A save that failed as well is told at the end of the run.
        built.manager.wait()
    latest = built.manager.latest(verify=False)
    kept = f"the last good checkpoint is {latest.location}" if latest else "there is no checkpoint yet"
    parts.append(f"The step was not applied; {kept}. Lower the learning rate, lengthen warm-up, or look at the samples named.")
    return " ".join(parts)


def _bad_gradient(built: Built) -> dict[str, Any] | None:
    """The parameter whose non-finite gradient came first: backward runs against the order of parameters."""
    for name, parameter in reversed(list(built.sharded.parameters().items())):
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            return {"rank": built.world.rank, "module": name.rpartition(".")[0] or "the model", "parameter": name}
    return None
