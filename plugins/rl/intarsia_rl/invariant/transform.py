"""The transform `batch_invariant`: a recipe whose trainer and generators use the kernels of the table. Torch is imported only to learn what `train.device=auto` means."""

from __future__ import annotations

import chz
from intarsia.config import Recipe
from intarsia.plugins import current

from intarsia_rl.config import RolloutsConfig
from intarsia_rl.invariant import table


def batch_invariant(recipe: Recipe) -> Recipe:
    """The recipe with `kernels` from the table, for the device it names; kernels of the table that it names already stay. Rollouts get `invariant=True`."""
    device = device_of(recipe)
    # Of plugins that are not installed nothing is called. Core's operators are in no registry.
    installed = {entry.name for entry in current().registry("operator").entries()}
    chosen = {op: kernel for op, kernel in table.kernels(device).items() if op in installed or op in table.OF_CORE}
    named = {}
    for op, kernel in recipe.kernels.items():
        for row in table.rows_of(op, device):
            if kernel in (row.kernel, row.kernel.rpartition(":")[2], row.kernel.rpartition("/")[2]):
                named[op] = row.kernel
    kernels = chosen | named
    for op in chosen:
        if op not in named:
            kernels[op] = next(row.kernel for row in table.rows_of(op, device) if not row.unfit(kernels))
    recipe = chz.replace(recipe, kernels=kernels)
    if isinstance(recipe.data.loader, RolloutsConfig):
        loader = chz.replace(recipe.data.loader, invariant=True)
        recipe = chz.replace(recipe, data=chz.replace(recipe.data, loader=loader))
    return recipe


def device_of(recipe: Recipe) -> str:
    """`cpu` or `cuda`: what `train.device` comes to on this machine."""
    return device_named(recipe.train.device)


def device_named(name: str) -> str:
    """`cpu` or `cuda`: what a setting for a device comes to on this machine."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
