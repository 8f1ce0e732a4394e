"""Which layer of two models with the same weights is the first whose outputs differ. Names of one side are those of the other by the family's Hugging Face table.

Modules correspond where the parameters beneath the one are by the table exactly those beneath the other: blocks, attentions, projections, norms.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Difference:
    """A module's outputs and those of its counterpart: the largest difference, relative to their largest number."""

    ours: str
    theirs: str
    error: float


def counterparts(rows: Sequence[Any], ours: nn.Module, theirs: nn.Module) -> dict[str, str]:
    """Our modules' names to theirs. `rows` are the rules of the table for this model (`intarsia_huggingface.rules.Row`)."""
    owners: dict[str, set[str]] = {}
    for row in rows:
        for name in row.theirs:
            owners.setdefault(name, set()).update(row.ours)
    beneath: dict[str, set[str]] = {}
    for name, parameters in owners.items():
        for parameter in parameters:
            for module in _ancestors(parameter):
                beneath.setdefault(module, set()).add(name)
    our_names, their_names = (set(dict(model.named_modules(remove_duplicate=False))) for model in (ours, theirs))
    found = {}
    for module, names in beneath.items():
        prefix = _common([name.split(".")[:-1] for name in names])
        if not prefix or module not in our_names or prefix not in their_names:
            continue
        same = {name for name in owners if name.startswith(f"{prefix}.")} == names
        if same and all(parameter.startswith(f"{module}.") for name in names for parameter in owners[name]):
            found[module] = prefix
    return found


def _ancestors(parameter: str) -> list[str]:
    parts = parameter.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _common(paths: Sequence[Sequence[str]]) -> str:
    same = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        same.append(parts[0])
    return ".".join(same)


@contextlib.contextmanager
def recorded(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Outputs of these modules while the block runs, in the order in which they come; of each call the first tensor."""
    outputs: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:
                outputs.setdefault(name, []).append(tensor.detach())

        return hook

    modules = dict(model.named_modules(remove_duplicate=False))
    handles = [modules[name].register_forward_hook(keep(name)) for name in names]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = tuple(output.values())
    return _first_tensor(output[0]) if isinstance(output, (tuple, list)) and output else None


def differences(
    ours: Mapping[str, Sequence[Tensor]], theirs: Mapping[str, Sequence[Tensor]], names: Mapping[str, str], order_N: Tensor | None = None
) -> list[Difference]:
    """Of modules that both sides ran with outputs of one size, in the order in which ours finished. `order_N`: see `Samples.order_N`."""
    found = []
    for name, mine in ours.items():
        others = theirs.get(names[name])
        if not others:
            continue
        a, b = (
            torch.cat([each.reshape(-1, each.shape[-1]) if each.dim() else each.reshape(1, 1) for each in side]) for side in (mine, others)
        )
        if a.shape != b.shape or (len(mine) == len(others) == 1 and mine[0].dim() == others[0].dim() and mine[0].shape != others[0].shape):
            continue
        if order_N is not None and len(others) > 1 and len(order_N) % len(b) == 0:
            each = len(order_N) // len(b)
            b = b[order_N[::each] // each]
        scale = float(b.abs().max()) or 1.0
        found.append(Difference(name, names[name], float((a - b).abs().max()) / scale))
    return found


def first_layer(found: Sequence[Difference], blocks: Sequence[str], allowed: float) -> str:
    """In words: the first layer that differs by more than is allowed, and in it the first of its parts.

    Layers are the blocks, and what stands outside of them.
    """
    holders = {each.ours for each in found if any(block.startswith(f"{each.ours}.") for block in blocks)}
    tops = ({each.ours for each in found} - holders) | set(blocks)
    layers = [each for each in found if each.ours in tops and not any(each.ours.startswith(f"{top}.") for top in tops)]
    wrong = [each for each in layers if not each.error <= allowed]
    if not layers:
        return "No layer could be compared: no module of the one side corresponds to one of the other by the table."
    if not wrong:
        last = layers[-1]
        return f"All {len(layers)} layers that could be compared agree within {allowed:.0e}, the last one ({last.ours}) to {last.error:.1e}: it is what comes behind them."
    first = wrong[0]
    before = layers[: layers.index(first)]
    text = f"The first layer that differs is {first.ours} (theirs: {first.theirs}), by {first.error:.1e}"
    parts = [each for each in found if each.ours.startswith(f"{first.ours}.") and not each.error <= allowed]
    if parts:
        text += f"; in it first {parts[0].ours.removeprefix(f'{first.ours}.')} ({parts[0].theirs.removeprefix(f'{first.theirs}.')}), by {parts[0].error:.1e}"
    if before:
        text += f". The {len(before)} before it agree to {max(each.error for each in before):.1e}"
    return f"{text}."
