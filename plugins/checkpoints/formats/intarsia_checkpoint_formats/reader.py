"""A checkpoint as something to read: any box of any tensor, any value, without the run that wrote it. Torch is imported when a tensor is read."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intarsia.checkpoint import commit
from intarsia.checkpoint.commit import BASE, find_backend
from intarsia.checkpoint.manifest import MANIFEST, MARKER, Manifest
from intarsia.contracts import Box, CheckpointBackend, Storage
from intarsia.errors import CheckpointError, UsageError, did_you_mean
from intarsia.plugins import Plugins, current

if TYPE_CHECKING:
    from torch import Tensor


class Checkpoint:
    """An open checkpoint. Make one with `open_checkpoint`. Stability: provisional."""

    def __init__(self, storage: Storage, folder: str, plugins: Plugins | None = None):
        self.storage, self.folder = storage, folder
        self.location = f"{storage.describe().rstrip('/')}/{folder}"
        self.manifest: Manifest = commit.load_manifest(storage, folder)
        self._plugins = plugins
        self._sound: set[str] = set()

    def keys(self) -> list[str]:
        """Keys of all tensors and values, sorted. What belongs to one rank has `@rankN` behind the item's key when it is a tensor."""
        return sorted([*self.manifest.tensors, *self.manifest.values])

    def value(self, key: str) -> Any:
        """The JSON value of a replicated or keyed item; for kind rank an object from rank (as a string) to its value."""
        if key not in self.manifest.values:
            raise CheckpointError(f"{self.location} has no value {key!r}. {did_you_mean(key, self.manifest.values)}")
        return self.manifest.values[key].value

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """A new CPU tensor with `box` of the stored tensor (all of it when None), of the box's size and the stored dtype.

        CheckpointError where a file that holds the tensor was changed: each one's hash is compared before anything of it is read.
        """
        import torch
        from intarsia.checkpoint.loading import read_into
        from intarsia.checkpoint.staging import Target

        record = self.manifest.tensors.get(key)
        if record is None:
            raise CheckpointError(f"{self.location} has no tensor {key!r}. {did_you_mean(key, self.manifest.tensors)}")
        box = Box.whole(record.shape) if box is None else box
        if len(box.size) != len(record.shape) or any(end > size for end, size in zip(box.end, record.shape, strict=True)):
            raise UsageError(f"The box {box} is not inside the shape {list(record.shape)} of {key!r} in {self.location}.")
        for name in {piece.file for piece in record.pieces} - self._sound:
            if problem := commit.check_file(self.storage, self.folder, self.manifest.files[name], hashes=True):
                raise CheckpointError(f"{self.location} is damaged: {name} {problem}. Use an older one, or restore this file.")
            self._sound.add(name)
        target = Target(record, (box,) if box.numel else (), torch.empty(box.size, dtype=getattr(torch, record.dtype)))
        read_into(self.storage, self.backend, self.folder, [target])
        return target.value

    @functools.cached_property
    def backend(self) -> CheckpointBackend:
        """The backend that wrote this. CheckpointError, naming it, where it is not installed."""
        return find_backend(self.manifest.backend, self._plugins or current())

    def verify(self) -> list[tuple[str, str]]:
        """(file, what is wrong with it) of every damaged, missing or surplus file. Reads everything; marker and manifest were checked on opening."""
        found = [
            (file.name, problem)
            for file in self.manifest.files.values()
            if (problem := commit.check_file(self.storage, self.folder, file, hashes=True))
        ]
        known = {f"{self.folder}/{name}" for name in (*self.manifest.files, MANIFEST, MARKER)}
        surplus = [name for name in self.storage.list(self.folder) if name not in known]
        return found + [(name[len(self.folder) + 1 :], "does not belong to the checkpoint") for name in surplus]


def storage_of_folder(folder: Path, plugins: Plugins | None = None) -> Storage:
    """The storage called `posix` at a folder of this machine."""
    chosen = plugins or current()
    return chosen.build(chosen.config_class(chosen.registry("storage").find("posix"))(), folder)


def storage_of_run(run: str | os.PathLike[str], plugins: Plugins | None = None) -> Storage:
    """The storage that a run directory's recipe names; the directory itself where it has no recipe."""
    if not (Path(run) / "recipe.json").exists():
        return storage_of_folder(Path(run).absolute(), plugins)
    from intarsia import config

    chosen = plugins or current()
    return chosen.build(config.load_saved(Path(run), plugins=chosen).recipe.checkpoint.storage, Path(run).absolute())


def open_checkpoint(path: str | os.PathLike[str], storage: Storage | None = None, plugins: Plugins | None = None) -> Checkpoint:
    """The checkpoint in a folder, or the newest complete one of a run directory.

    With `storage`, `path` is a checkpoint's folder in it, or "" for the newest one of its run. CheckpointError where there is none, or one in a newer
    format. Stability: provisional.
    """
    place = Path(path).expanduser().absolute()
    if storage is None and ((place / MARKER).exists() or (place / MANIFEST).exists()):
        return Checkpoint(storage_of_folder(place.parent, plugins), place.name, plugins)
    if storage is not None and str(path):
        return Checkpoint(storage, str(path), plugins)
    storage = storage or storage_of_run(place, plugins)
    complete, skipped = commit.scan(storage, BASE)
    commit.refuse_newer(skipped)
    if not complete:
        reasons = "".join(f"\n  {entry.folder}: {entry.reason}" for entry in skipped)
        raise CheckpointError(f"There is no complete checkpoint in {storage.describe()}.{reasons}")
    return Checkpoint(storage, complete[0].folder, plugins)
