"""A component that is nothing but its state, and a checkpoint manager over any storage: for tests of state, storages and backends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from intarsia.checkpoint import CheckpointManager
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.contracts import StateItem, Storage
from intarsia.layout import Layout
from torch import Tensor


class Holder:
    """A Stateful that gives the items it was made with and remembers what it was given back (`loaded`, `missing_rank_state`)."""

    def __init__(self, *items: StateItem):
        self.items = list(items)
        self.loaded: dict[str, Any] | None = None
        self.missing_rank_state = False

    def state(self) -> list[StateItem]:
        """The items."""
        return list(self.items)

    def load_state(self, values: Mapping[str, Any], missing_rank_state: bool = False) -> None:
        """Remember."""
        self.loaded, self.missing_rank_state = dict(values), missing_rank_state


def tensor_item(name: str, value: Tensor, layout: Layout | None = None, owner: str = "model", version: int = 1) -> StateItem:
    """A tensor item; without a layout it is whole."""
    dtype = str(value.dtype).removeprefix("torch.")
    return StateItem(owner, name, "tensor", value, layout or Layout.whole(tuple(value.shape), dtype), version)


class OverStorage(CheckpointManager):
    """A CheckpointManager over a given Storage; saves by the named backend's default settings.

    Without `plugins` those of the process are used. `options` are fields of the CheckpointConfig.
    """

    def __init__(
        self,
        storage: Storage,
        comm: Communicator | None = None,
        facts: dict[str, Any] | None = None,
        *,
        backend: str = "stream",
        exclusive: bool = False,
        timeout_s: float = 30.0,
        **options: Any,
    ):
        from intarsia.config import CheckpointBackendConfig, CheckpointConfig, StorageConfig
        from intarsia.plugins import current

        plugins = current()
        config_class = plugins.config_class(plugins.registry("checkpoint backend").find(backend))
        place = plugins.config_class(plugins.registry("storage").find("posix"))()  # Replaced below.
        config = CheckpointConfig(backend=cast(CheckpointBackendConfig, config_class()), storage=cast(StorageConfig, place), **options)
        super().__init__(config, Path("."), comm or SelfCommunicator(), plugins, facts or {}, exclusive=exclusive, timeout_s=timeout_s)
        self.storage = storage
