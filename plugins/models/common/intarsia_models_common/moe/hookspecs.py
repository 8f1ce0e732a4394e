"""The kind that this distribution owns. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import offer


@offer("dispatcher", base="intarsia_models_common.moe.config:DispatcherConfig")
def offer_dispatchers() -> Sequence[Entry]:
    """Ways of bringing tokens to the ranks that have their experts, and results back. Target: `build(config, experts, comm) -> Dispatcher` (`intarsia_models_common.moe.dispatch`);
    `experts` counts those of all ranks, `comm` is the group over which they are cut. The entry `local` serves a group of one."""
    return ()
