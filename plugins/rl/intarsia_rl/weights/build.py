"""A model for a generator: built from the run's recipe, and filled with the run's initial weights, bit for bit as the trainer has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from intarsia.checkpoint.weights import check_fit, open_weights
from intarsia.config import Recipe
from intarsia.contracts import Box, WeightReader
from intarsia.layout import slices, whole_region
from intarsia.parameters import ParameterTable, fill_region, materialise_buffers, persistent_buffers
from intarsia.plugins import Plugins
from torch import Tensor, nn

from intarsia_rl.weights.fill import Holds, Part, canonical_names, forget


def build_model(
    recipe: Recipe,
    plugins: Plugins,
    device: torch.device | str,
    dtype: torch.dtype | str,
    cut: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """The recipe's model on one device, in `eval` and without gradients. Parameters have memory and no values yet; ties are one tensor.

    It is whole, or what `cut` leaves of it, which gets the whole model on the meta device and gives parameters other shapes. Parameters are of `dtype`, but of the trainer's own where that
    is not `precision.compute` (`keeps_float32`, a bucket's `compute`), and float32 where their module says so and `dtype` is of fewer bits than the trainer's. Buffers have their initial values.
    """
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    model: Any = on_meta(recipe, plugins)
    dtypes, compute = compute_dtypes(recipe, model, plugins), getattr(torch, recipe.precision.compute)
    if cut is not None:
        cut(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    made: dict[str, nn.Parameter] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    wide = kept_wide(model) if wanted != compute else set()
    for name, canonical in canonical_names(model).items():
        if canonical not in made:
            kind = torch.float32 if canonical in wide else wanted if dtypes[canonical] == compute else dtypes[canonical]
            made[canonical] = nn.Parameter(torch.empty(named[canonical].shape, dtype=kind, device=device), requires_grad=False)
        owner, _, attribute = name.rpartition(".")
        setattr(modules[owner], attribute, made[canonical])
    materialise_buffers(model, torch.device(device), recipe.train.seed)
    return model.eval().requires_grad_(False)


def on_meta(recipe: Recipe, plugins: Plugins) -> Any:
    """The recipe's model, whole, without memory."""
    with torch.device("meta"):
        return plugins.build(recipe.model)


def kept_wide(model: nn.Module) -> set[str]:
    """The names of the parameters that stay float32 whatever a model computes in (`keeps_float32` of their module)."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in getattr(type(module), "keeps_float32", ())
    }


@torch.no_grad()
def fill_initial(model: nn.Module, recipe: Recipe, plugins: Plugins, holds: Holds | None = None) -> None:
    """Version 0: what the trainer begins with (`train.init_from`, or what the seed draws), as it computes with it. `holds` as `fill` has it, for a model that is cut. CheckpointError where
    weights do not fit."""
    forget(model)
    whole: nn.Module = model if holds is None else on_meta(recipe, plugins)
    named, names = dict(model.named_parameters(remove_duplicate=False)), canonical_names(model)
    kept = persistent_buffers(model)
    parameters = {name: named[name] for name, canonical in names.items() if name == canonical}
    wholes = dict(whole.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(wholes[name].shape) for name in parameters}
    weights = open_weights(recipe.train.init_from, plugins) if recipe.train.init_from else None
    if weights is not None:
        check_fit(weights, shapes | {name: tuple(buffer.shape) for name, buffer in kept.items()})
    dtypes = compute_dtypes(recipe, whole, plugins)
    inits, seed = model.inits(), recipe.train.seed  # type: ignore[operator]
    for name, parameter in parameters.items():
        for part in (holds or {}).get(name, (Part(name),)):
            box = part.box or Box.whole(shapes[name])
            master = torch.empty(box.size, dtype=getattr(torch, recipe.precision.master))
            _fill(name, master, shapes[name], box, weights, inits, seed)
            target = parameter[slices(part.where or Box.whole(parameter.shape))]
            target.copy_(master.to(dtypes[name]).reshape(target.shape))
    for name, buffer in kept.items():
        if weights is not None:
            buffer.copy_(weights.read(name))
        elif name in inits:
            fill_region(name, buffer.shape, inits[name], whole_region(buffer.shape), buffer, seed)


def _fill(name: str, master: Tensor, shape: tuple[int, ...], box: Box, weights: WeightReader | None, inits: Any, seed: int) -> None:
    if weights is not None:
        master.copy_(weights.read(name, box))
    else:
        fill_region(name, shape, inits[name], (box,), master, seed)


def compute_dtypes(recipe: Recipe, model: nn.Module, plugins: Plugins) -> dict[str, torch.dtype]:
    """By canonical name the dtype in which the recipe's trainer computes with a parameter; `model` is whole, on any device."""
    precision, sharder = recipe.precision, plugins.build(recipe.sharder)
    table = ParameterTable.from_model(model, precision.master, precision.compute, precision.reduce)
    stated = sharder.compute_dtypes(model, table) if hasattr(sharder, "compute_dtypes") else dict.fromkeys(table, precision.compute)
    return {name: getattr(torch, dtype) for name, dtype in stated.items()}
