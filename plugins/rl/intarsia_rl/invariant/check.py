"""What the batch-invariant mode cannot promise is refused before a run, by name. Torch-free but for what is in force."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import chz
from intarsia.config import ComponentConfig, Config, Recipe
from intarsia.errors import UsageError

from intarsia_rl.invariant import table
from intarsia_rl.invariant.transform import device_named, device_of

if TYPE_CHECKING:
    from intarsia.contracts import Run
    from intarsia.plugins import Plugins

_HINT = "`intarsia rl parity --list` shows what the mode supports; `--with batch_invariant` chooses its kernels."


def check(run: Run) -> None:
    """Check a run's recipe and the kernels that are in force in this process. UsageError with every reason."""
    from intarsia import ops
    from intarsia.plugins import current

    check_recipe(run.recipe, current(), {name: op.choice.kernel for name, op in ops.operators().items()})


def check_recipe(recipe: Recipe, plugins: Plugins, choices: Mapping[str, str], environment: Mapping[str, str] | None = None) -> None:
    """Check a recipe, and the kernels (operator to `reference` or full name) that were chosen for it. UsageError with every reason, each naming what it refuses."""
    found = problems(recipe, plugins, choices, os.environ if environment is None else environment)
    if found:
        raise UsageError("The batch-invariant mode cannot hold: " + " ".join(found) + f" {_HINT}")


def problems(recipe: Recipe, plugins: Plugins, choices: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Why the mode cannot hold, in sentences; empty where it can."""
    device, dtype = device_of(recipe), recipe.precision.compute
    return [
        *_settings(recipe, device, dtype),
        *_model(recipe, plugins),
        *kernel_problems(choices, device, dtype, environment),
    ]


def kernel_problems(choices: Mapping[str, str], device: str, dtype: str, environment: Mapping[str, str]) -> list[str]:
    """What is wrong with the kernels chosen for operators, and with the environment that they need."""
    found = []
    for op, kernel in choices.items():
        rows = table.rows_of(op, device)
        if not rows:
            found.append(f"Operator {op!r} is not in its table for {device}: nobody has shown that its rows do not depend on the batch.")
            continue
        fitting = [row for row in rows if row.kernel == kernel]
        if not fitting:
            allowed = " or ".join(row.kernel for row in rows)
            found.append(f"Kernel {kernel!r} of operator {op!r} is not in its table for {device}; {allowed} is.")
        for row in fitting:
            if dtype not in row.dtypes:
                found.append(
                    f"Kernel {kernel!r} of operator {op!r} is in its table for {' and '.join(row.dtypes)} only, and the run computes in {dtype}."
                )
            if other := row.unfit(choices):
                others = " or ".join(each.kernel for each in rows if not each.unfit(choices))
                found.append(
                    f"Kernel {kernel!r} of operator {op!r} has the bits of {' and '.join(row.beside[other])}, and {choices[other]!r} is in force for {other!r}. Use {others}."
                )
            for name, value in row.environment.items():
                if environment.get(name) != value:
                    now = f"is {environment[name]!r}" if name in environment else "is not set"
                    found.append(
                        f"Kernel {kernel!r} of operator {op!r} needs {name}={value} in the environment of every process from its start, and here it {now}."
                    )
    if device == "cpu" and environment.get("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT").upper() != "STRICT":
        found.append("ONEDNN_DEFAULT_FPMATH_MODE lets products round their inputs as they see fit: unset it.")
    if device == "cuda" and environment.get("NVIDIA_TF32_OVERRIDE", "0") != "0":
        found.append("NVIDIA_TF32_OVERRIDE rounds the inputs of float32 products: unset it.")
    return found


def cut_text(tensor: int) -> str:
    """Why a generator that is cut is refused."""
    why = table.REFUSED["generator.tensor above 1"]
    return f"generator.tensor={tensor}: {why[0].lower()}{why[1:]} Use generator.tensor=1, and more generators (data.loader.generators) in the place of ranks."


def _settings(recipe: Recipe, device: str, dtype: str) -> Iterator[str]:
    if device not in ("cpu", "cuda"):
        yield f"There is no table for train.device={device}."
    elif dtype not in table.dtypes(device):
        yield f"On {device} it computes in {' or '.join(table.dtypes(device))}; precision.compute is {dtype}."
    if recipe.compile.mode != "none":
        yield f"compile.mode is {recipe.compile.mode}: compiled code rounds otherwise than the generator's. Use compile.mode=none."
    cut = [f"mesh.{axis}={getattr(recipe.mesh, axis)}" for axis in ("pp", "cp", "tp", "ep") if getattr(recipe.mesh, axis) > 1]
    if cut:
        yield f"{', '.join(cut)}: ranks would sum what a generator sums alone. Use {' and '.join(table.MESH)}."
    generator = getattr(recipe.data.loader, "generator", None)
    if (own := getattr(generator, "dtype", "auto")) not in ("auto", dtype):
        yield f"generator.dtype is {own} and precision.compute {dtype}: the two sides would round otherwise. Use generator.dtype=auto."
    if (place := getattr(generator, "device", device)) != device and device_named(place) != device:
        yield f"generator.device={place} is {device_named(place)} here, and the trainer computes on {device}: other kernels give other bits. Use generator.device={device}."
    tensor = getattr(generator, "tensor", 1)
    if isinstance(tensor, int) and tensor > 1:
        yield cut_text(tensor)
    loader: Any = recipe.data.loader
    if getattr(loader, "audit", 1) < 1 and getattr(loader, "max_lag", 0) > 0:
        yield f"data.loader.audit=0 leaves steps whose tokens are all of older weights (max_lag={loader.max_lag}) without a gap to show. Use data.loader.audit=1 or more, or max_lag=0."
    sharder: Any = recipe.sharder
    payloads = {
        getattr(sharder, "payload", "plain"),
        *(getattr(bucket, "payload", None) or "plain" for bucket in getattr(sharder, "buckets", ())),
    }
    if payloads != {"plain"}:
        yield "The sharder gathers weights as float8, which the generator does not hold. Use sharder.payload=plain."


def _model(recipe: Recipe, plugins: Plugins) -> Iterator[str]:
    family = plugins.entry_of(recipe.model).full_name
    if family not in table.MODELS:
        yield f"Model family {family!r} is not in its table ({', '.join(table.MODELS)})."
    refused: dict[str, list[str]] = {}
    for path, node in _nodes(recipe.model, "model"):
        if isinstance(node, ComponentConfig):
            name = plugins.entry_of(node).full_name
            if name not in table.COMPONENTS:
                refused.setdefault(name, []).append(path)
            if getattr(node, "jitter", 0.0):
                yield f"{path}.jitter multiplies what the trainer's router sees by noise. Use {path}.jitter=0."
        dispatcher = getattr(node, "dispatcher", None)
        if isinstance(dispatcher, Config) and plugins.entry_of(dispatcher).full_name not in table.DISPATCHERS:
            yield f"Dispatcher {plugins.entry_of(dispatcher).full_name!r} at {path} is not in its table ({', '.join(table.DISPATCHERS)})."
    for name, paths in refused.items():
        more = f" and {len(paths) - 1} more places" if len(paths) > 1 else ""
        why = f" {table.REFUSED[name]}" if name in table.REFUSED else ""
        yield f"Component {name!r} at {paths[0]}{more} is not in its table.{why}"


def _nodes(value: Any, path: str) -> Iterator[tuple[str, Config]]:
    """All config nodes at and below a value, with their paths."""
    if isinstance(value, Config):
        yield path, value
        for name in chz.chz_fields(value):
            yield from _nodes(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _nodes(item, f"{path}.{name}")
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from _nodes(item, f"{path}.{number}")
