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
    return {name: _group_of(groups, name) for name in names}


def _group_of(groups: Sequence[ParameterGroup], name: str) -> str:
    return next((group.name for group in groups if any(fnmatch.fnmatchcase(name, glob) for glob in group.match)), DEFAULT)


def freeze(groups: Sequence[ParameterGroup], model: nn.Module) -> None:
    """Turn off gradients of the parameters in frozen groups. Aliases of a tied parameter are found by its canonical (first) name.

    UsageError where nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    frozen = {group.name for group in groups if group.frozen}
    for name, group in assign(groups, parameters).items():
        if group in frozen:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError("No parameter trains: every one is in a frozen group.")


def optimizer_groups(
    groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter], trainable: Iterable[str]
) -> list[OptimizerGroup]:
    """The groups that the optimizer is built with, in declared order, `default` last; frozen parameters and empty groups are left out."""
    # Not checked again for globs that match nothing: a pipeline stage has not all of the parameters.
    members = {name: _group_of(groups, name) for name in parameters}
    allowed = set(trainable)
    options = {group.name: group.options for group in groups} | {DEFAULT: {}}
    made = []
    for name in options:
        mine = {parameter: parameters[parameter] for parameter, group in members.items() if group == name and parameter in allowed}
        if mine:
            made.append(OptimizerGroup(name, mine, options[name]))
    return made
