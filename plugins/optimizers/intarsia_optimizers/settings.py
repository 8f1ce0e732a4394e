"""What the optimizers share of settings: a group's own, and checks that name the field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import chz
from intarsia.config import OptimizerConfig
from intarsia.contracts import OptimizerGroup
from intarsia.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from intarsia.parameters import ParameterTable
    from torch import nn

OptimizerSettings = TypeVar("OptimizerSettings", bound=OptimizerConfig)

# Half-open intervals of the fields that nearly every optimizer has.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "lr": (0.0, math.inf),
    "weight_decay": (0.0, math.inf),
    "l2": (0.0, math.inf),
    "eps": (0.0, math.inf),
    "betas": (0.0, 1.0),
    "momentum": (0.0, 1.0),
}


def group_settings(
    config: OptimizerSettings, group: OptimizerGroup, bounds: Mapping[str, tuple[float, float]] = BOUNDS, fixed: Sequence[str] = ()
) -> OptimizerSettings:
    """`config` with the group's options in place of its own fields, in range. Raises UsageError naming the group and the field.

    `fixed` are fields that hold for the optimizer as a whole and are no group's to set.
    """
    known = chz.chz_fields(config)
    for name in group.options:
        if name not in known:
            raise UsageError(
                f"Parameter group {group.name!r} sets {name!r}, which is no field of {type(config).__name__}. {did_you_mean(name, known)}"
            )
        if name in fixed:
            raise UsageError(f"Parameter group {group.name!r} sets {name!r}, which holds for all groups: set optimizer.{name}.")
    try:
        settings = chz.replace(config, **dict(group.options))
    except TypeError as error:
        raise UsageError(f"Parameter group {group.name!r}: {error}") from error
    for name, (low, high) in bounds.items():
        value = getattr(settings, name, low)
        for number in value if isinstance(value, tuple) else (value,):
            if not low <= number < high:
                where = f"Parameter group {group.name!r}: {name}" if name in group.options else f"optimizer.{name}"
                raise UsageError(f"{where} is {number}; it must be at least {low:g} and below {high:g}.")
    return settings


def by_decay(group: OptimizerGroup, table: ParameterTable, vectors: bool) -> Iterator[tuple[bool, dict[str, nn.Parameter]]]:
    """Whether they decay, and the group's parameters of which that holds: those of at least two dimensions decay, the others where `vectors` is true."""
    for decayed in (True, False):
        # The table's shape, not the parameter's: the local part of a matrix may be flat.
        yield (
            decayed,
            {name: parameter for name, parameter in group.parameters.items() if (vectors or len(table[name].shape) >= 2) == decayed},
        )


def check_choice(field: str, value: str, known: Sequence[str]) -> None:
    """`optimizer.FIELD` is one of the known values. Raises UsageError with the nearest."""
    if value not in known:
        raise UsageError(f"optimizer.{field} {value!r} is unknown. {did_you_mean(value, known)}")


def check_state_dtype(config: OptimizerConfig) -> str:
    """The policy `optimizer.state_dtype`. Raises UsageError unless it is a known one."""
    policy: str = config.state_dtype  # type: ignore[attr-defined]
    check_choice("state_dtype", policy, ("master", "bfloat16"))
    return policy
