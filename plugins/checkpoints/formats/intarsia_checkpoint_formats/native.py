"""Copy a checkpoint whole: every tensor and value, perhaps by another backend. Boxes are joined: each tensor becomes one box."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from intarsia.checkpoint import Checkpoint, CheckpointRef, open_checkpoint, write_checkpoint
from intarsia.checkpoint.reader import BASE, find_backend, storage_of_folder, storage_of_run
from intarsia.contracts import Storage
from intarsia.errors import UsageError, did_you_mean
from intarsia.plugins import current


def check_options(options: Mapping[str, str], known: tuple[str, ...]) -> None:
    """UsageError for an option that the format does not have."""
    for name in options:
        if name not in known:
            raise UsageError(f"Unknown option {name!r}. {did_you_mean(name, known)}")


def copy(checkpoint: Checkpoint, storage: Storage, options: Mapping[str, str]) -> CheckpointRef:
    """Commit the same state in `storage`, a tensor at a time."""
    check_options(options, ("backend",))
    manifest = checkpoint.manifest
    name = manifest.backend
    if "backend" in options:
        name = current().registry("checkpoint backend").find(options["backend"]).full_name
    return write_checkpoint(
        storage,
        BASE,
        (name, find_backend(name, current())),
        manifest.step,
        list(manifest.tensors.values()),
        lambda record: checkpoint.read(record.key),
        manifest.values.values(),
        manifest.facts,
        manifest.world,
    )


class NativeFormat:
    """See `intarsia.contracts.CheckpointFormat`."""

    def export(self, checkpoint: Checkpoint, folder: Path, options: Mapping[str, str]) -> list[Path]:
        """Into `folder/checkpoints/`, so that `folder` can be named where a run directory is asked for."""
        ref = copy(checkpoint, storage_of_folder(folder.absolute()), options)
        return sorted(path for path in (folder / ref.folder).rglob("*") if path.is_file())

    def import_(self, source: Path, run: Path, options: Mapping[str, str]) -> str:
        """From a checkpoint's folder or a run directory into the storage of `run`."""
        return copy(open_checkpoint(source), storage_of_run(run), options).location
