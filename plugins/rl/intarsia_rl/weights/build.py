"""A model for a generator: built from the run's recipe, and filled with the run's initial weights, bit for bit as the trainer has them."""

from __future__ import annotations

from typing import Any

import torch
from intarsia.checkpoint.weights import check_fit, open_weights
from intarsia.config import Recipe
from intarsia.contracts import WeightReader
from intarsia.layout import whole_region
from intarsia.parameters import ParameterTable, fill_region, materialise_buffers, persistent_buffers
from intarsia.plugins import Plugins
from torch import Tensor, nn

from intarsia_rl.weights.fill import canonical_names, forget


def build_model(recipe: Recipe, plugins: Plugins, device: torch.device | str, dtype: torch.dtype | str) -> nn.Module:
    """The recipe's model, whole on one device, in `eval` and without gradients. Parameters have memory and no values yet; ties are one tensor.

    Parameters are of `dtype`, but of the trainer's own where that is not `precision.compute` (`keeps_float32`, a bucket's `compute`), and float32 where their module says so and `dtype`
    is of fewer bits than the trainer's. Buffers have their initial values.
    """
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"):
        model: Any = plugins.build(recipe.model)
    modules = dict(model.named_modules(remove_duplicate=False))
    made: dict[str, nn.Parameter] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    dtypes, compute = compute_dtypes(recipe, model, plugins), getattr(torch, recipe.precision.compute)
    wide = kept_wide(model) if wanted != compute else set()
    for name, canonical in canonical_names(model).items():
        if canonical not in made:
            kind = torch.float32 if canonical in wide else wanted if dtypes[canonical] == compute else dtypes[canonical]
            made[canonical] = nn.Parameter(torch.empty(named[canonical].shape, dtype=kind, device=device), requires_grad=False)
        owner, _, attribute = name.rpartition(".")
        setattr(modules[owner], attribute, made[canonical])
    materialise_buffers(model, torch.device(device), recipe.train.seed)
    return model.eval().requires_grad_(False)


def kept_wide(model: nn.Module) -> set[str]:
    """The names of the parameters that stay float32 whatever a model computes in (`keeps_float32` of their module)."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in getattr(type(module), "keeps_float32", ())
    }


@torch.no_grad()
def fill_initial(model: nn.Module, recipe: Recipe, plugins: Plugins) -> None:
    """Version 0: what the trainer begins with (`train.init_from`, or what the seed draws), as it computes with it. CheckpointError where weights do not fit."""
    forget(model)
    named, names = dict(model.named_parameters(remove_duplicate=False)), canonical_names(model)
    kept = persistent_buffers(model)
    parameters = {name: named[name] for name, canonical in names.items() if name == canonical}
    weights = open_weights(recipe.train.init_from, plugins) if recipe.train.init_from else None
    if weights is not None:
        check_fit(weights, {name: tuple(tensor.shape) for name, tensor in (parameters | kept).items()})
    dtypes = compute_dtypes(recipe, model, plugins)
    inits = model.inits()  # type: ignore[operator]
    for name, parameter in parameters.items():
        master = torch.empty(parameter.shape, dtype=getattr(torch, recipe.precision.master))
        _fill(name, master, weights, inits, recipe.train.seed)
        parameter.copy_(master.to(dtypes[name]))
    for name, buffer in kept.items():
        if weights is not None:
            buffer.copy_(weights.read(name))
        elif name in inits:
            fill_region(name, buffer.shape, inits[name], whole_region(buffer.shape), buffer, recipe.train.seed)


def _fill(name: str, master: Tensor, weights: WeightReader | None, inits: Any, seed: int) -> None:
    if weights is not None:
        master.copy_(weights.read(name))
    else:
        fill_region(name, master.shape, inits[name], whole_region(master.shape), master, seed)


def compute_dtypes(recipe: Recipe, model: nn.Module, plugins: Plugins) -> dict[str, torch.dtype]:
    """By canonical name the dtype in which the recipe's trainer computes with a parameter; `model` is whole, on any device."""
    precision, sharder = recipe.precision, plugins.build(recipe.sharder)
    table = ParameterTable.from_model(model, precision.master, precision.compute, precision.reduce)
    stated = sharder.compute_dtypes(model, table) if hasattr(sharder, "compute_dtypes") else dict.fromkeys(table, precision.compute)
    return {name: getattr(torch, dtype) for name, dtype in stated.items()}
