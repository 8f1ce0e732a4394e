"""Parameter groups: which optimizer settings apply to which parameter, by glob on canonical names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from intarsia.config import ParameterGroup
from intarsia.contracts import OptimizerGroup
from intarsia.errors import UsageError, did_you_mean

DEFAULT = "default"


def assign(groups: Sequence[ParameterGroup], names: Iterable[str]) -> dict[str, str]:
    """For each parameter name the name of its group: the first that matches, else `default`.

    Raises UsageError for two groups of one name and for a glob that matches no parameter at all.
    """
    names = list(names)
    seen: set[str] = {DEFAULT}
    for group in groups:
        if group.name in seen:
            raise UsageError(
                f"There are two parameter groups {group.name!r}; a group's name is unique, and `{DEFAULT}` is the one for the rest."
            )
        seen.add(group.name)
        for glob in group.match:
            if not any(fnmatch.fnmatchcase(name, glob) for name in names):
                raise UsageError(f"Parameter group {group.name!r}: {glob!r} matches no parameter. {did_you_mean(glob, names)}")
    return {name: next((group.name for group in groups if _matches(group, name)), DEFAULT) for name in names}


def _matches(group: ParameterGroup, name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in group.match)


def freeze(groups: Sequence[ParameterGroup], model: nn.Module) -> None:
    """Turn off gradients of the parameters in frozen groups. Aliases of a tied parameter are found by its canonical (first) name."""
    parameters = dict(model.named_parameters())
    frozen = {group.name for group in groups if group.frozen}
    for name, group in assign(groups, parameters).items():
        if group in frozen:
            parameters[name].requires_grad_(False)


def optimizer_groups(
    groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter], trainable: Iterable[str]
) -> list[OptimizerGroup]:
    """The groups that the optimizer is built with, in declared order, `default` last; frozen parameters and empty groups are left out."""
    members = assign(groups, parameters)
    allowed = set(trainable)
    options = {group.name: group.options for group in groups} | {DEFAULT: {}}
    made = []
    for name in options:
        mine = {parameter: parameters[parameter] for parameter, group in members.items() if group == name and parameter in allowed}
        if mine:
            made.append(OptimizerGroup(name, mine, options[name]))
    if not made:
        raise UsageError("No parameter trains: every one is in a frozen group.")
    return made
