"""What an operator is: a name, a reference, and the implementation that is in force."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import torch

from intarsia.contracts import Entry
from intarsia.errors import PluginError, UsageError, did_you_mean
from intarsia.ops import references
from intarsia.ops.attention_reference import attention as _attention
from intarsia.ops.cross_entropy_reference import cross_entropy as _cross_entropy
from intarsia.plugins import Plugins, current

log = logging.getLogger("intarsia.ops")

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation of an operator runs, and why. `kernel` is `reference` or an entry's full name. Stability: provisional."""

    kernel: str
    reason: str
    function: Function | None = None


class Operator:
    """An operator. Calling it runs what is in force; `reference` is its definition. Stability: provisional.

    A kernel's function has the reference's signature. It may have two attributes that are functions as well:
    `supports(*arguments) -> str | None` says why it cannot take these arguments (the reference takes them, and the reason is logged once);
    `prepare(packing, **facts) -> None` derives from a batch's packing, outside compiled regions, what the kernel needs of it.
    """

    def __init__(self, name: str, reference: Function, sort: Literal["pointwise", "norm", "other"], invariant: bool) -> None:
        self.name = name
        self.reference = reference
        self.sort = sort
        self.invariant = invariant
        self.__doc__ = reference.__doc__
        self.put(Choice("reference", "nothing was selected"))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._run(*arguments, **named)

    def put(self, choice: Choice) -> None:
        """Put a choice in force."""
        self.choice = choice
        function = choice.function
        supports = getattr(function, "supports", None)
        if function is None:
            self._run = self.reference
        elif supports is None:
            self._run = function
        else:
            self._run = self._guarded(function, supports, choice.kernel)

    def prepare(self, packing: Any, **facts: Any) -> None:
        """Let the kernel in force derive from `packing` what it needs, once for a batch."""
        prepare = getattr(self.choice.function, "prepare", None)
        if prepare is not None and packing is not None:
            prepare(packing, **facts)

    def _guarded(self, function: Function, supports: Function, kernel: str) -> Function:
        reference, name, told = self.reference, self.name, set[str]()

        def run(*arguments: Any, **named: Any) -> Any:
            reason = supports(*arguments, **named)
            if reason is None:
                return function(*arguments, **named)
            if not torch.compiler.is_compiling() and reason not in told:
                told.add(reason)
                log.info("%s: %s cannot take this call (%s); the reference does", name, kernel, reason)
            return reference(*arguments, **named)

        return run


linear = Operator("linear", references.linear, "other", invariant=False)
rms_norm = Operator("rms_norm", references.rms_norm, "norm", invariant=True)
rope = Operator("rope", references.rope, "pointwise", invariant=True)
swiglu = Operator("swiglu", references.swiglu, "pointwise", invariant=True)
embedding = Operator("embedding", references.embedding, "other", invariant=True)
attention = Operator("attention", _attention, "other", invariant=False)
cross_entropy = Operator("cross_entropy", _cross_entropy, "other", invariant=False)
_OPERATORS = {op.name: op for op in (rms_norm, rope, swiglu, embedding, attention, cross_entropy, linear)}


def operators(plugins: Plugins | None = None) -> Mapping[str, Operator]:
    """All operators by name: core's, and those that plugins own, whose code is imported. Stability: provisional."""
    return {**_OPERATORS, **{name: _imported(entry, plugins) for name, entry in _offered(plugins).items()}}


def find(name: str, plugins: Plugins | None = None) -> Operator:
    """The operator `name`, of core or of a plugin, of which only its code is imported. Raises UsageError with the nearest names."""
    return _found((name,), plugins)[name]


def _found(names: Collection[str], plugins: Plugins | None = None) -> dict[str, Operator]:
    """Those of these names. A generator asks in every step: what plugins offer is looked at once."""
    offered = {} if _OPERATORS.keys() >= set(names) else _offered(plugins)
    for name in names:
        if name not in _OPERATORS and name not in offered:
            raise UsageError(f"There is no operator {name!r}. {did_you_mean(name, (*_OPERATORS, *offered))}")
    return {name: _OPERATORS[name] if name in _OPERATORS else _imported(offered[name], plugins) for name in names}


def _offered(plugins: Plugins | None) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in (plugins or current()).registry("operator").entries():
        if entry.name in _OPERATORS or found.setdefault(entry.name, entry) is not entry:
            other = found[entry.name].full_name if entry.name in found else "intarsia.ops"
            raise PluginError(
                f"Operator {entry.full_name!r} needs another name: {other} has this one. Models call operators, so a run has one of a name."
            )
    return found


def _imported(entry: Entry, plugins: Plugins | None) -> Operator:
    found = (plugins or current()).target(entry)
    if not isinstance(found, Operator) or found.name != entry.name:
        raise PluginError(
            f"Operator {entry.full_name!r}: its target {entry.target!r} must be an intarsia.ops.Operator of the name {entry.name!r}."
        )
    return found


@contextlib.contextmanager
def installed(choices: Mapping[str, Choice]) -> Iterator[None]:
    """Put choices in force for the length of a `with` block. Operators that are not named keep theirs. Stability: provisional."""
    found = _found(choices)
    before = {name: operator.choice for name, operator in found.items()}
    try:
        for name, operator in found.items():
            operator.put(choices[name])
        yield
    finally:
        for name, operator in found.items():
            operator.put(before[name])
