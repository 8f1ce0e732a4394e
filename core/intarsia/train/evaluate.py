"""Evaluation: the same held-out batches each time, in sums; nothing of it depends on accumulation or on the number of ranks."""

from __future__ import annotations

import math
import time

import torch

from intarsia.contracts import Evaluates, LossSum
from intarsia.train.built import Built
from intarsia.train.step import add_up, over_ranks


def evaluate(built: Built) -> dict[str, float]:
    """Mean loss in nats for each counted token, `bits_per_byte` where the loader knows the bytes, the loss's further sums as means, and the
    token counts. A collective. Empty where not a single held-out token counts, which is reported."""
    loader, start = built.evaluation, time.perf_counter()
    assert loader is not None
    loader.reset()
    built.model.eval()
    results: list[LossSum] = []
    counted = size_bytes = unknown = 0
    try:
        while (batches := loader.next_step()) is not None:
            for batch in batches:
                counted += built.loss.count(batch)
                size_bytes += batch.extra.get("bytes", 0)
                unknown += "bytes" not in batch.extra
                results.append(built.engine.evaluate(built.on_device(batch)))
    finally:
        built.model.train()
    for state in built.step_states:
        if isinstance(state, Evaluates):
            state.evaluated(lambda tensor: built.mesh.stage.all_reduce(tensor, what="evaluation's state"))
    sums = add_up(results)
    # Of the ranks that share a part of the data one counts it.
    first = not any(built.mesh.coordinates[axis] for axis in ("pp", "cp", "tp"))
    counts = torch.tensor([counted, size_bytes, unknown], dtype=torch.float64, device=built.device) * first
    names, values = over_ranks(built, sums, counts, "evaluation")
    *totals, counted, size_bytes, unknown = values.tolist()
    if not counted:
        built.warn("Evaluation: no held-out token is trained on, so there is no loss. Look at data.held_out or data.evaluation.")
        return {}
    metrics = {name: total / counted for name, total in zip(names, totals, strict=True)}
    if size_bytes and not unknown:
        metrics["bits_per_byte"] = metrics["loss"] * counted / math.log(2) / size_bytes
    return metrics | {"counted_tokens": int(counted), "seconds_s": time.perf_counter() - start}
