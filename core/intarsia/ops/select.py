"""Which implementation of each operator a run uses, chosen once, each choice with its reason."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from intarsia.contracts import KernelEntry
from intarsia.errors import UsageError, did_you_mean
from intarsia.ops.operator import Choice, Operator, find, operators

if TYPE_CHECKING:
    from intarsia.plugins import Plugins

# The environment variable that names a file of measurements of this machine.
MEASUREMENTS = "INTARSIA_KERNEL_MEASUREMENTS"


@dataclasses.dataclass(frozen=True)
class Selection:
    """One choice for each operator. Stability: provisional."""

    choices: Mapping[str, Choice]

    def facts(self) -> dict[str, dict[str, str]]:
        """Operator to `{"value": kernel, "reason": why}`, for `Resolved.decide` and the run's records."""
        return {op: {"value": choice.kernel, "reason": choice.reason} for op, choice in self.choices.items()}


def install(selection: Selection) -> None:
    """Put a selection in force in this process. Stability: provisional."""
    for name, choice in selection.choices.items():
        find(name).put(choice)


def select(
    kernels: Mapping[str, str],
    plugins: Plugins,
    capabilities: Collection[str],
    dtype: str,
    *,
    compiled: bool = False,
    invariant: bool = False,
    measured: Mapping[str, float] | None = None,
) -> Selection:
    """Choose an implementation of every operator.

    Arguments: `kernels` maps operator names or `*` to a kernel's name, `reference` or `auto` (what is not mapped is `auto`); `capabilities` is what
    this machine has (`intarsia.device.capabilities()`); `dtype` the compute dtype's name; `compiled` says that the model runs in
    compiled regions; `invariant` admits only what promises results independent of the batch around a row; `measured` maps
    kernels' full names to their speed over the reference inside a compiled region on this machine (more than 1: faster); None: the file that
    INTARSIA_KERNEL_MEASUREMENTS names, as `intarsia kernels bench --compiled --save FILE` writes it.

    Raises UsageError for an unknown operator or kernel (with the nearest), for a named kernel that this run cannot use (with what is
    missing), and in invariant mode where nothing fits. Stability: provisional.
    """
    entries = [entry for entry in plugins.registry("kernel").entries() if isinstance(entry, KernelEntry)]
    for named in set(kernels) - {"*"}:
        find(named, plugins)
    default = kernels.get("*", "auto")
    if default not in ("auto", "reference") and not any(_named(entry, default) for entry in entries):
        hint = did_you_mean(default, {entry.name for entry in entries} | {"auto", "reference"})
        raise UsageError(f"No operator has a kernel {default!r} (asked for by kernels.*). {hint}")
    context = _Context(plugins, frozenset(capabilities), dtype, compiled, invariant, _recorded() if measured is None else measured)
    choices = {}
    for name, op in operators(plugins).items():
        own = [entry for entry in entries if entry.op == name]
        wanted = kernels.get(name) or (default if default == "reference" or any(_named(entry, default) for entry in own) else "auto")
        choices[name] = context.automatic(op, own) if wanted == "auto" else context.named(op, own, wanted)
    return Selection(choices)


def _recorded() -> Mapping[str, float]:
    path = os.environ.get(MEASUREMENTS)
    if not path:
        return {}
    try:
        return {str(name): float(speed) for name, speed in json.loads(Path(path).read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{MEASUREMENTS} names {path}, which cannot be read as measurements of kernels: {error}") from error


def _named(entry: KernelEntry, name: str) -> bool:
    """A kernel is called by its name, its full name, or the last part of an `op/name`, which keeps one owner's entries apart."""
    return name in (entry.name, entry.full_name, entry.name.removeprefix(f"{entry.op}/"))


@dataclasses.dataclass(frozen=True)
class _Context:
    plugins: Plugins
    capabilities: frozenset[str]
    dtype: str
    compiled: bool
    invariant: bool
    measured: Mapping[str, float]

    def obstacle(self, entry: KernelEntry) -> str | None:
        """Why this run cannot use a kernel at all."""
        missing = [need for need in entry.needs if need not in self.capabilities]
        if missing:
            return f"this machine lacks {', '.join(missing)}"
        if entry.dtypes and self.dtype not in entry.dtypes:
            return f"it takes {', '.join(entry.dtypes)} and the run computes in {self.dtype}"
        if self.compiled and not entry.in_compile:
            return "it may not sit inside a compiled region"
        if self.invariant and not entry.invariant:
            return "it does not promise results that are independent of the batch (invariant)"
        return None

    def named(self, op: Operator, entries: Sequence[KernelEntry], name: str) -> Choice:
        if name == "reference":
            if self.invariant and not op.invariant:
                raise UsageError(
                    f"The reference of {op.name} does not promise results that are independent of the batch, which this mode asks for."
                )
            return Choice("reference", "asked for")
        found = [entry for entry in entries if _named(entry, name)]
        if not found:
            names = {entry.name.removeprefix(f"{op.name}/") for entry in entries} | {"auto", "reference"}
            raise UsageError(f"Operator {op.name} has no kernel {name!r}. {did_you_mean(name, names)}")
        if len(found) > 1:
            owners = " and ".join(entry.full_name for entry in found)
            raise UsageError(f"Operator {op.name} has several kernels named {name!r}: {owners}. Choose one by its full name.")
        obstacle = self.obstacle(found[0])
        if obstacle:
            raise UsageError(
                f"Kernel {found[0].full_name} for operator {op.name} cannot be used: {obstacle}. Choose another, or `kernels.{op.name}=auto`."
            )
        return self.choice(found[0], "asked for")

    def automatic(self, op: Operator, entries: Sequence[KernelEntry]) -> Choice:
        skipped: list[str] = []
        for entry in sorted(entries, key=lambda entry: (-entry.priority, entry.full_name)):
            reason = self.obstacle(entry) or self.unattractive(op, entry)
            if reason is None:
                return self.choice(entry, "; ".join([f"auto: highest priority ({entry.priority}) that fits", *skipped]))
            skipped.append(f"not {entry.full_name}: {reason}")
        if self.invariant and not op.invariant:
            raise UsageError(
                f"No kernel for operator {op.name} promises results that are independent of the batch, nor does its reference"
                f"{' (' + '; '.join(skipped) + ')' if skipped else ''}. Install one, or turn the invariant mode off."
            )
        return Choice("reference", "; ".join(["auto: the reference", *(skipped or ["no kernel is installed"])]))

    def unattractive(self, op: Operator, entry: KernelEntry) -> str | None:
        if entry.priority <= 0:
            return "its priority is not above the reference's; it runs when named"
        if self.compiled and op.sort != "other" and self.measured.get(entry.full_name, 0.0) <= 1.0:
            return f"inside compiled regions the reference of a {op.sort} operator fuses, and no measurement says that this is faster"
        return None

    def choice(self, entry: KernelEntry, reason: str) -> Choice:
        return Choice(entry.full_name, reason, self.plugins.target(entry))
