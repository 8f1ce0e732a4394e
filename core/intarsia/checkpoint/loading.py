"""From a complete checkpoint into components: strict by name both ways, all checks before the first byte is changed."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from intarsia.checkpoint.manifest import Manifest, TensorRecord
from intarsia.checkpoint.planning import Read
from intarsia.checkpoint.staging import Target, dtype_name, local_region
from intarsia.contracts import CheckpointBackend, Migrates, Piece, Stateful, StateItem, Storage
from intarsia.errors import CheckpointError, nearest
from intarsia.layout import whole_region

Items = Mapping[str, tuple[Stateful, StateItem]]


def compare_keys(
    manifest: Manifest, expected: Collection[str], everywhere: Collection[str], allow: tuple[Sequence[str], Sequence[str]]
) -> list[str]:
    """What is wrong by name, in words: items that this rank expects and the checkpoint lacks, and those that no rank takes (`everywhere`).

    `allow` are globs of keys that may be missing, and of keys that may be left over.
    """
    saved = manifest.items()
    missing = [key for key in expected if key not in saved and not _matches(key, allow[0])]
    surplus = [key for key in saved if key not in everywhere and not _matches(key, allow[1])]
    lines = []
    for title, keys, others in (("missing in the checkpoint", missing, surplus), ("only in the checkpoint", surplus, missing)):
        if keys:
            lines.append(f"{len(keys)} {title}:")
            for key in sorted(keys)[:20]:
                close = nearest(key, others, 1)
                lines.append(f"  {key}{f'  (on the other side: {close[0]})' if close else ''}")
            if len(keys) > 20:
                lines.append(f"  ... and {len(keys) - 20} more")
    return lines


def _matches(key: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, glob) for glob in globs)


def compare_items(manifest: Manifest, items: Items, allow_dtype: Sequence[str]) -> list[str]:
    """What is wrong with kinds, shapes, dtypes and versions of the items on both sides, in words."""
    saved, lines = manifest.items(), []
    for key, (component, item) in items.items():
        if key not in saved:
            continue
        kind, version = saved[key]
        if kind != item.kind:
            lines.append(f"  {key}: saved as {kind}, wanted as {item.kind}")
        elif version > item.version:
            lines.append(
                f"  {key}: saved in version {version} of its schema, {item.owner} reads up to {item.version}: upgrade {item.owner}"
            )
        elif version < item.version and not isinstance(component, Migrates):
            lines.append(f"  {key}: saved in version {version} of its schema, {item.owner} is at {item.version} and cannot migrate")
        elif isinstance(item.value, torch.Tensor) and kind != "rank":
            shape = list(item.layout.shape if item.layout else item.value.shape)
            dtype = dtype_name(item.value.dtype, key)
            record = manifest.tensors.get(key)
            if record is None:
                lines.append(f"  {key}: saved as JSON, wanted as a tensor")
            elif list(record.shape) != shape:
                lines.append(f"  {key}: saved with shape {list(record.shape)}, wanted {shape}")
            elif record.dtype != dtype and not _matches(key, allow_dtype):
                lines.append(f"  {key}: saved in {record.dtype}, wanted {dtype} (allow the conversion by name, if it is meant)")
    return lines


def fill(
    manifest: Manifest,
    items: Items,
    storage: Storage,
    backend: CheckpointBackend,
    folder: str,
    place: tuple[int, int, Mapping[str, int]],
    same_mesh: bool,
) -> list[tuple[Stateful, dict[str, Any]]]:
    """Read this rank's part into the tensors of `items` and give each component its values. `place` is rank, world and mesh."""
    rank, world, mesh = place
    targets: dict[str, Target] = {}
    for key, (_, item) in items.items():
        record = manifest.tensors.get(key) or (manifest.tensors.get(f"{key}@rank{rank}") if same_mesh else None)
        if record is not None:
            targets[key] = _target(record, item, rank, world, mesh)
    read_into(storage, backend, folder, list(targets.values()))
    found: dict[int, tuple[Stateful, dict[str, Any]]] = {}
    saved = manifest.items()
    for key, (component, item) in items.items():
        _, values = found.setdefault(id(component), (component, {}))
        if key in targets:
            value = targets[key].value
        elif key not in manifest.values or (item.kind == "rank" and not same_mesh):
            continue
        else:
            value = manifest.values[key].value
            value = value[str(rank)] if item.kind == "rank" else value
        if saved[key][1] < item.version and isinstance(component, Migrates):
            value = component.migrate(item.name, saved[key][1], value)
            if item.kind == "tensor":
                item.value.detach().copy_(value)
                value = item.value
        values[item.name] = item.value if item.kind == "tensor" else value
    return list(found.values())


def _target(record: TensorRecord, item: StateItem, rank: int, world: int, mesh: Mapping[str, int]) -> Target:
    if item.kind == "tensor":
        return Target(record, local_region(item, mesh, rank, world)[1], item.value)
    value = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
    return Target(record, whole_region(record.shape), value)


def read_into(storage: Storage, backend: CheckpointBackend, folder: str, targets: Sequence[Target]) -> None:
    """Fill the targets. Every byte that they want must arrive, each piece once."""
    waiting: dict[Piece, list[tuple[Target, Read]]] = {}
    for target in targets:
        for read in target.reads():
            waiting.setdefault(read.piece, []).append((target, read))

    def deliver(piece: Piece, data: memoryview) -> None:
        for target, read in waiting.pop(piece):
            target.deliver(read, data)

    backend.read(storage, folder, list(waiting), deliver)
    if waiting:
        piece = next(iter(waiting))
        raise CheckpointError(f"The checkpoint backend did not deliver {piece.key!r} from {folder}/{piece.file}.")
    for target in targets:
        target.finish()
