"""Which kernel carries out an update rule: chosen once, when the optimizer is built, from what plugins offer (`offer_optimizer_kernels`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from intarsia.contracts import KernelEntry
from intarsia.device import capabilities
from intarsia.errors import UsageError, did_you_mean
from intarsia.plugins import current

log = logging.getLogger("intarsia.optimizers")

KIND = "optimizer kernel"


def choose_kernel(
    op: str,
    field: str,
    wanted: str,
    reference: Callable[..., Any],
    device: torch.device,
    dtype: torch.dtype,
    words: Sequence[str] = ("auto", "reference"),
) -> Callable[..., Any]:
    """What runs rule `op` for tensors of `dtype` on `device`: `reference` itself, or a kernel.

    `wanted` is `auto` (the kernel of the highest priority that fits), `reference`, or a kernel's name; `words` are what else the field may say. Raises UsageError, naming `optimizer.FIELD`, for
    a name that no kernel of this rule has, and for one that cannot be used here.
    """
    if wanted == "reference":
        return reference
    plugins = current()
    offered = plugins.registry(KIND).entries() if KIND in plugins.kinds() else []
    entries = [entry for entry in offered if isinstance(entry, KernelEntry) and entry.op == op]
    if wanted == "auto":
        fitting = [entry for entry in entries if entry.priority > 0 and not _obstacle(entry, device, dtype)]
        if not fitting:
            return reference
        entry = max(fitting, key=lambda entry: entry.priority)
    else:
        found = [entry for entry in entries if wanted in (entry.name, entry.full_name)]
        if not found:
            known = [entry.name for entry in entries] + list(words)
            raise UsageError(
                f"optimizer.{field} {wanted!r} is unknown: no installed kernel for {op} is called so. {did_you_mean(wanted, known)}"
            )
        entry = found[0]
        if device.type == "meta":  # A plan, which carries nothing out, and whose device has other kernels than this machine.
            return reference
        obstacle = _obstacle(entry, device, dtype)
        if obstacle:
            raise UsageError(
                f"optimizer.{field}: kernel {entry.full_name} for {op} cannot be used: {obstacle}. Set optimizer.{field}=auto."
            )
    return _guarded(plugins.target(entry), entry.full_name, reference)


def _obstacle(entry: KernelEntry, device: torch.device, dtype: torch.dtype) -> str:
    missing = [need for need in entry.needs if need not in capabilities()]
    if missing:
        return f"this machine lacks {', '.join(missing)}"
    if "cuda" in entry.needs and device.type != "cuda":
        return f"the parameters are on {device.type}"
    name = str(dtype).removeprefix("torch.")
    return f"it takes {', '.join(entry.dtypes)}, not {name}" if entry.dtypes and name not in entry.dtypes else ""


def _guarded(kernel: Callable[..., Any], name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, but for calls that it says it cannot take."""
    supports = getattr(kernel, "supports", None)
    if supports is None:
        return kernel
    told: set[str] = set()

    def run(*arguments: Any) -> Any:
        reason = supports(*arguments)
        if reason is None:
            return kernel(*arguments)
        if reason not in told:
            told.add(reason)
            log.info("%s cannot take this call (%s); the reference does", name, reason)
        return reference(*arguments)

    run.takes_sums = takes_sums(kernel)  # type: ignore[attr-defined]
    return run


def takes_sums(kernel: Callable[..., Any]) -> bool:
    """Whether a kernel takes a gradient as contributions that have not been added (`intarsia_optimizers.updates.Gradient`): it says so by an attribute."""
    return getattr(kernel, "takes_sums", False)
