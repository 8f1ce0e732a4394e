"""A checkpoint written by one process that never holds more than one tensor: imports and copies."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from intarsia import __version__
from intarsia.checkpoint import commit
from intarsia.checkpoint.manifest import TensorRecord, ValueRecord, tensor_head
from intarsia.contracts import Box, CheckpointBackend, StateItem, Storage

if TYPE_CHECKING:
    from torch import Tensor


def write_checkpoint(
    storage: Storage,
    base: str,
    backend: tuple[str, CheckpointBackend],
    step: int,
    heads: Sequence[TensorRecord],
    make: Callable[[TensorRecord], Tensor],
    values: Iterable[ValueRecord] = (),
    facts: Mapping[str, Any] | None = None,
    world: int = 1,
) -> commit.CheckpointRef:
    """Write and commit a checkpoint under `base`. Stability: provisional.

    `backend` is its full entry name and itself. `heads` are records (pieces ignored) of the tensors, which `make` gives one by
    one, whole, as CPU tensors, when their turn comes. `world` is the number of ranks that `values` and tensors of kind rank have entries for.
    """

    def tensors() -> Iterator[tuple[StateItem, list[tuple[Box, Tensor]]]]:
        for head in heads:
            if head.numel:
                name = head.key.removeprefix(f"{head.owner}/")
                tensor = make(head).contiguous()
                yield StateItem(head.owner, name, head.kind, tensor, version=head.version), [(Box.whole(head.shape), tensor)]

    token = commit.temporary_token(secrets.token_hex(6))
    temporary = commit.temporary_folder(base, token, 1, step)
    with commit.explain(step, storage, lambda: "writing it", lambda: ""):
        try:
            written = backend[1].write(storage, temporary, 0, tensors())
            parts = [commit.part_json(written, {head.key: tensor_head(head) for head in heads}, {})]
            records = {record.key: dataclasses.asdict(record) for record in values}
            writer = f"intarsia {__version__}"
            fields = {"step": step, "world": world, "writer": writer, "backend": backend[0], "facts": dict(facts or {})}
            return commit.publish(storage, base, temporary, fields, parts, records)
        except BaseException:
            storage.remove(temporary)
            raise
