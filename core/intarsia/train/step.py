"""One optimizer step.

Losses and gradients are sums over tokens; the one division, by the number of counted tokens of the whole step over all ranks, is the `scale` that
every backward is given. That number is known before the first forward, from one small all-reduce on the host; a second one on the device
carries the sums out. The device is waited for once in a step: to see that loss and norm are finite before the update is applied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from intarsia.contracts import Batch, LossSum, StepSummary
from intarsia.errors import CheckpointError, DistributedError, NumericsError
from intarsia.train.built import Built


@dataclasses.dataclass(frozen=True)
class Flags:
    """What ranks tell each other at the end of a step: whether any wants to stop, whether any has failed."""

    stop: bool = False
    failed: bool = False


def agree_on_tokens(built: Built, batches: Sequence[Batch] | None) -> tuple[int, int, float] | None:
    """(counted tokens, all tokens, FLOPs of media) of the step over all ranks; None when the data has ended on every rank.

    Every rank takes part whether it has data or not, so that nobody waits for a rank that has run out. Raises DistributedError when they differ.
    """
    mine = batches or ()
    counted = sum(built.loss.count(batch) for batch in mine)
    tokens = sum(batch.tokens_BS.numel() for batch in mine)
    media_flops = getattr(built.model, "media_flops", None)
    media = sum(media_flops(batch.extra) for batch in mine) if media_flops else 0.0
    # Counts are exact in float64, to 2**53.
    vector = torch.tensor([batches is None, len(mine), counted, tokens, media], dtype=torch.float64)
    ended, micro_batches, counted, tokens, media = built.data.all_reduce(vector, what="tokens of the step").tolist()
    if ended == built.data.size:
        return None
    if ended or micro_batches != len(mine) * built.data.size:
        sides = built.data.gather_json(None if batches is None else len(batches), what="micro-batches of the step")
        text = ", ".join(
            f"rank {rank}: {'no data left' if count is None else f'{count} micro-batches'}" for rank, count in enumerate(sides)
        )
        raise DistributedError(
            f"Ranks differ in the data of step {built.run.step}: {text}. The loader must give every rank the same number of micro-batches."
        )
    return int(counted), int(tokens), media


def train_step(built: Built, flags: Callable[[], Flags]) -> tuple[StepSummary, Flags] | None:
    """Run step `run.step`; None when the data has ended. `flags` is asked on this rank near the end of the step."""
    run, train, start = built.run, built.resolved.recipe.train, time.perf_counter()
    step = run.step
    batches = built.loader.next_step()
    agreed = agree_on_tokens(built, batches)
    if batches is None or agreed is None:
        return None
    counted, tokens, media = agreed
    built.hooks.before_step(run=run, step=step)
    scale = 1.0 / counted if counted else 0.0
    batches = [built.on_device(batch) for batch in batches]
    sums = add_up(built.engine.run(batches, scale, built.sharded))
    built.sharded.finish_gradients()
    parameters = built.sharded.parameters()
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    norm = built.table.norm(gradients, built.world, train.clip_norm_type)
    asked = flags()
    told = torch.tensor([asked.stop, asked.failed], dtype=torch.float64, device=built.device)
    names, values = over_ranks(built, sums, told, "loss of the step")
    *totals, stop, failed, norm_value = torch.cat([values, norm.to(values).reshape(1)]).tolist()
    metrics = {name: total * scale for name, total in zip(names, totals, strict=True)}
    loss = metrics.pop("loss")
    if not (math.isfinite(loss) and math.isfinite(norm_value)):
        raise not_finite(built, batches, scale, loss, norm_value)
    clip(list(gradients.values()), norm_value, train.clip_norm)
    if counted == 0:
        built.warn(f"Step {step}: no token of the global batch is trained on; its gradient is 0.")
    factor = built.schedule.factor(step, train.steps)
    update(built, step, factor)
    rates = built.optimizer.learning_rates()
    summary = StepSummary(
        step=step,
        loss=loss,
        gradient_norm=norm_value,
        learning_rate=next(iter(rates.values()), 0.0) * factor,
        tokens=tokens,
        counted_tokens=counted,
        seconds_s=time.perf_counter() - start,
        metrics=metrics,
        media_flops=media,
    )
    run.step = step + 1
    built.progress.tokens += tokens
    return summary, Flags(stop > 0, failed > 0)


def add_up(results: Sequence[LossSum]) -> dict[str, Tensor]:
    """This rank's sums over micro-batches by name (`loss` and further ones), float64 scalars on the device."""
    sums = {"loss": torch.stack([result.total.double() for result in results]).sum()}
    for name in {name: None for result in results for name in result.sums}:
        sums[name] = torch.stack([result.sums[name].double() for result in results if name in result.sums]).sum()
    return sums


def over_ranks(built: Built, sums: dict[str, Tensor], further: Tensor, what: str) -> tuple[list[str], Tensor]:
    """Names of all sums, and their totals over the mesh with those of `further` behind. Ranks along tp have the same sums: the first one's count."""
    names = sorted(sums)
    if built.mesh.sizes["pp"] > 1:  # Stages have sums of their own.
        names = sorted({name for each in built.world.gather_json(names, what=f"names, {what}") for name in each})
    mine = torch.stack([sums[name] if name in sums else torch.zeros_like(sums["loss"]) for name in names])
    values = torch.cat([torch.zeros_like(mine) if built.mesh.coordinates["tp"] else mine, further])
    return names, built.world.all_reduce(values, what=what)


def not_finite(built: Built, batches: Sequence[Batch], scale: float, loss: float, norm: float) -> NumericsError:
    """The error that ends the run, the same on every rank. A collective."""
    cause = built.engine.explain_not_finite(batches, scale, built.sharded, built.world)
    with contextlib.suppress(CheckpointError):  # A save that failed as well is told at the end of the run.
        built.manager.wait()
    latest = built.manager.latest(verify=False)
    kept = f"the last good checkpoint is {latest.location}" if latest else "there is no checkpoint yet"
    return NumericsError(
        f"Step {built.run.step} is not finite: loss {loss:g}, gradient norm {norm:g}. {cause} The step was not applied; {kept}. Lower the learning rate, "
        "lengthen warm-up, or look at the samples named."
    )


@torch.no_grad()
def clip(gradients: list[Tensor], norm: float, limit: float | None) -> None:
    """Scale the gradients down so that their global norm, which is `norm`, is at most `limit`."""
    if limit is not None and norm > limit and gradients:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))


def update(built: Built, step: int, factor: float) -> None:
    """Apply the update: the sharder's, by the optimizer, and of what models count during a step."""
    for state in built.step_states:
        state.reduce(lambda tensor: built.mesh.stage.all_reduce(tensor, what="step state"))
    built.hooks.before_update(run=built.run, step=step)
    built.sharded.update(built.optimizer, factor)
    for state in built.step_states:
        state.commit()
    built.sharded.zero_gradients()
