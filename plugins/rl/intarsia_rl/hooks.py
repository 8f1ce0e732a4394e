"""What a run of rollouts does at the run's events: check before anything is built, show the loader the built parts, record each step. Called on every rank."""

from __future__ import annotations

import bisect
import itertools
import statistics
from typing import TYPE_CHECKING, Any

from intarsia.contracts import Run
from intarsia.errors import NumericsError, PluginError

if TYPE_CHECKING:
    from intarsia.contracts import Batch
    from torch import Tensor

    from intarsia_rl.loader import RolloutsLoader


def check(run: Run) -> None:
    """Refuse what cannot be right, in batch-invariant mode every operator that is not in its table. Before the build."""
    from intarsia_rl.loader import check_settings

    loader: Any = run.recipe.data.loader
    check_settings(loader, run.recipe)
    if loader.invariant:
        from intarsia_rl.invariant.check import check as check_invariant

        check_invariant(run)


def attach(run: Run) -> None:
    """Give the loader the run's parts, and have it start its processes. A collective."""
    loader_of(run).attach(run)


def record_step(run: Run, step: int) -> None:
    """Write the event `rollouts`: the controller's numbers of the step, and the largest difference between the log-probabilities of trainer and generator. A collective.

    NumericsError, on every rank, where there is a difference in batch-invariant mode.
    """
    loader, loss = loader_of(run), run.parts["loss"]
    write_trained(run, step, loss)
    gap, tokens = gap_over_ranks(run, loss)
    stats = dict(loader.stats)
    advantages = stats.pop("advantages", [])
    if advantages:
        stats["advantage"] = {"mean": statistics.fmean(advantages), "deviation": statistics.pstdev(advantages)}
    run.record("rollouts", step=step + 1, gap=gap, gap_tokens=tokens, **stats)
    if gap and run.recipe.data.loader.invariant:  # type: ignore[attr-defined]
        raise NumericsError(
            f"Step {step + 1}: log-probabilities of trainer and generator differ by up to {gap:.3g} ({tokens} tokens of equal weights), and in the batch-invariant mode they are equal bit for "
            "bit. `intarsia rl parity` with this run's recipe names the first module and operator that differ. The step is not applied; to go on without the promise, resume with "
            "data.loader.invariant=false."
        )


def write_trained(run: Run, step: int, loss: Any) -> None:
    """Write the trainer's own log-probabilities of what it trained on beside the rollouts, where these are kept. A collective."""
    mesh, loader = run.parts["mesh"], run.recipe.data.loader
    if not getattr(loader, "keep_rollouts", False) or mesh.sizes["cp"] > 1 or not hasattr(loss, "seen"):
        return  # ranks along cp have parts of rows, cut as their attention needs it
    mine = [line for seen in loss.seen for line in trained_lines(*seen)] if mesh.coordinates["tp"] == 0 else []
    lines = (
        mine
        if mesh.world.size == 1
        else [line for each in mesh.world.gather_json(mine, what="log-probabilities of the step") for line in each]
    )
    if mesh.world.rank == 0:
        from intarsia_rl.controller.writer import RolloutWriter

        RolloutWriter(run.directory, lambda ids: "").write("trained", step + 1, lines)


def trained_lines(batch: Batch, where_N: Tensor, log_probs_N: Tensor) -> list[dict[str, Any]]:
    """For each segment in a micro-batch the log-probabilities of its trained tokens, in order."""
    size = batch.tokens_BS.shape[1]
    by_piece: dict[tuple[str, int], list[float]] = {}
    ends = [list(itertools.accumulate(row)) for row in batch.lengths]
    for place, value in zip(where_N.tolist(), log_probs_N.tolist(), strict=True):
        row, at = divmod(place, size)
        by_piece.setdefault(batch.extra["pieces"][row][bisect.bisect_right(ends[row], at)], []).append(value)
    return [{"id": name, "segment": segment, "log_probs": values} for (name, segment), values in by_piece.items()]


def gap_over_ranks(run: Run, loss: Any) -> tuple[float | None, int]:
    """(largest gap of any rank's tokens, how many tokens were compared) since the last call; None where none was. A collective."""
    import torch

    mesh = run.parts["mesh"]
    world, device = mesh.world, mesh.device
    gap, tokens = getattr(loss, "gap", None), getattr(loss, "gap_tokens", None)
    largest = torch.full((1,), -1.0, dtype=torch.float64, device=device) if gap is None else gap.detach().double().reshape(1).clone()
    count = torch.zeros(1, dtype=torch.float64, device=device) if tokens is None else tokens.detach().double().reshape(1).clone()
    count *= mesh.coordinates["tp"] == 0  # along tp every rank sees the same tokens
    world.all_reduce(largest, op="max", what="gap of the step")
    world.all_reduce(count, what="tokens of the gap")
    if hasattr(loss, "reset_gap"):
        loss.reset_gap()
    return (float(largest), int(count)) if float(count) > 0 else (None, 0)


def loader_of(run: Run) -> RolloutsLoader:
    """The run's loader."""
    from intarsia_rl.loader import RolloutsLoader

    loader = run.parts["data"]
    if not isinstance(loader, RolloutsLoader):
        raise PluginError(f"The run's loader is a {type(loader).__name__}, not the one that `rollouts` builds.")
    return loader
