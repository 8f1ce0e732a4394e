"""A family's sharding table read against a model: which module has which role."""

from __future__ import annotations

import dataclasses
import functools
import re
import traceback
from collections.abc import Sequence
from typing import Any

from intarsia import plugins
from intarsia.contracts import Role
from intarsia.errors import IntarsiaError, PluginError, UsageError, did_you_mean
from torch import nn


@dataclasses.dataclass(frozen=True)
class Placed:
    """One module with one role. `pattern` is the row's."""

    name: str
    module: nn.Module
    role_name: str
    role: Role
    pattern: str

    def ask(self, method: str, *arguments: Any) -> Any:
        """The role's `method(name, module, *arguments)`. What it raises that is meant for nobody becomes a PluginError that names role, module and method."""
        try:
            return getattr(self.role, method)(self.name, self.module, *arguments)
        except IntarsiaError:
            raise
        except Exception as error:
            raise PluginError(
                f"{self.name}: the role {self.role_name} ({type(self.role).__name__}.{method}) failed: {told(error)}"
            ) from error


Row = tuple[str, str, dict[str, Any]]


def rows_of(sharding: Any, config: Any, family: str) -> list[Row]:
    """The table's rows as (pattern, role, settings). `sharding` is the rows, or a function of the model's config that returns them."""
    rows = sharding
    if callable(sharding):
        try:
            rows = sharding(config)
        except IntarsiaError:
            raise
        except Exception as error:
            raise PluginError(f"The sharding table of {family} is a function that failed on the model's config: {told(error)}") from error
    if not isinstance(rows, tuple | list):
        raise PluginError(
            f"The sharding table of {family} is {'what a function gave, ' if callable(sharding) else ''}a {type(rows).__name__}; it is a tuple or list of rows "
            "(module pattern, role), or a function of the model's config that returns one."
        )
    found: list[Row] = []
    for number, row in enumerate(rows):
        good = isinstance(row, tuple | list) and 2 <= len(row) <= 3 and all(isinstance(each, str) for each in row[:2])
        if not good or (len(row) == 3 and not (isinstance(row[2], dict) and all(isinstance(key, str) for key in row[2]))):
            raise UsageError(
                f"Row {number} of the sharding table of {family} is {row!r}; a row is (module pattern, role) or (module pattern, role, {{setting: value}})."
            )
        found.append((row[0], row[1], dict(row[2]) if len(row) == 3 else {}))
    return found


def place(rows: Sequence[Row], model: nn.Module) -> tuple[list[Placed], list[str]]:
    """Roles by module, in table order, and what is wrong with rows: unknown roles, wrong settings, patterns that match nothing.

    `*` in a pattern is one dotted part; `?` at its end says that it may match nothing (a part of the family that some sizes have).
    """
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    placed: list[Placed] = []
    problems: list[str] = []
    for pattern, role_name, settings in rows:
        try:
            role = build_role(role_name, settings)
        except IntarsiaError as error:
            problems.append(f"{pattern!r}: {error}")
            continue
        names = [name for name in modules if matches(pattern.removesuffix("?"), name)]
        if not names and not pattern.endswith("?"):
            problems.append(
                f"{pattern!r} ({role_name}) names a module that {type(model).__name__} does not have. {_nearest(pattern, modules)}"
            )
        placed += [Placed(name, modules[name], role_name, role, pattern) for name in names]
    return placed, problems


def build_role(name: str, settings: dict[str, Any]) -> Role:
    """The role `name` (`role` or `owner:role`) with settings of its config. UsageError where there is no such role or setting."""
    loaded = plugins.current()
    entry = loaded.registry("role").find(name)
    if entry.config is None:
        if settings:
            raise UsageError(f"the role {name!r} has no settings, but the row gives {', '.join(settings)}.")
        try:
            role = loaded.target(entry)()
        except IntarsiaError:
            raise
        except Exception as error:
            raise PluginError(f"the role {entry.full_name!r} of plugin {entry.plugin} can't be built: {told(error)}") from error
    else:
        config_class = loaded.config_class(entry)
        known = list(config_class.__chz_fields__)  # type: ignore[attr-defined]
        unknown = [each for each in settings if each not in known]
        if unknown:
            raise UsageError(f"the role {name!r} has no setting {unknown[0]!r}. {did_you_mean(unknown[0], known)}")
        try:
            config = config_class(**settings)
        except (TypeError, ValueError) as error:
            raise UsageError(f"the role {name!r} does not take {settings}: {error}") from error
        role = loaded.build(config)
    if not isinstance(role, Role):
        lacks = [each for each in ("check", "cut", "apply") if not hasattr(role, each)]
        raise UsageError(f"the role {name!r} ({type(role).__name__}) is none: it lacks {', '.join(lacks)}. See intarsia.contracts.Role.")
    return role


def told(error: Exception) -> str:
    """An exception in one line, with where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"


def matches(pattern: str, name: str) -> bool:
    """Whether `name` is what `pattern` says, part by part."""
    return _compiled(pattern).fullmatch(name) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(r"\.".join(r"[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))


def _nearest(pattern: str, modules: dict[str, nn.Module]) -> str:
    """Names of modules as patterns would say them: numbers become `*`, so that all layers are one suggestion."""
    return did_you_mean(pattern.removesuffix("?"), {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in modules})


def inside(name: str, other: str) -> bool:
    """Whether the module `name` lies within `other`."""
    return name.startswith(f"{other}.")
