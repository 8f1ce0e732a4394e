"""The hook that this distribution declares: kernels for its update rules. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import KernelEntry
from intarsia.hookspecs import offer


@offer("optimizer kernel", entry=KernelEntry)
def offer_optimizer_kernels() -> Sequence[KernelEntry]:  # type: ignore[empty-body]
    """Kernels for the update rules of `intarsia_optimizers.updates`. Target: a callable with the signature of the rule that `op` names,
    `adamw_update`, `adamw_quantised`, `newton_schulz`, `muon_directions` or `muon_apply`.

    `dtypes` are those of the rule: the masters' (bfloat16 with split masters), for `newton_schulz` the `dtype` argument. The target may have an attribute
    `supports(*arguments) -> str | None`, which says why it cannot take a call; the reference takes it then. A distribution that works without
    this one marks its implementation `@hookimpl(optionalhook=True)`.
    """
