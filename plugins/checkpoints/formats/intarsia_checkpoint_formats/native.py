"""Copy a checkpoint whole: every tensor and value, perhaps by another backend. Boxes are joined: each tensor becomes one box."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from intarsia.checkpoint import CheckpointRef
from intarsia.checkpoint.commit import BASE, find_backend
from intarsia.checkpoint.manifest import MANIFEST, MARKER
from intarsia.contracts import Storage
from intarsia.errors import UsageError, did_you_mean
from intarsia.plugins import current

from intarsia_checkpoint_formats.reader import Checkpoint, open_checkpoint, storage_of_folder, storage_of_run
from intarsia_checkpoint_formats.weights import CheckpointWeights
from intarsia_checkpoint_formats.writer import write_checkpoint


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


def run_of(path: Path) -> Path | None:
    """The run directory that `path` is, or that the checkpoint in it belongs to."""
    return next((each for each in (path, path.parent.parent) if (each / "recipe.json").is_file()), None)


class NativeFormat:
    """See `intarsia.contracts.CheckpointFormat` and `WeightFormat`."""

    looks_for = f"a run directory with recipe.json and {BASE}/, or a checkpoint with {MANIFEST} and {MARKER}"

    def recognises(self, path: Path) -> bool:
        """A run directory, a checkpoint, or a folder of checkpoints."""
        return run_of(path) == path or any((path / name).exists() for name in (MARKER, MANIFEST, BASE))

    def open_weights(self, path: Path) -> CheckpointWeights:
        """Of the checkpoint, or of the run's newest complete one."""
        return CheckpointWeights(open_checkpoint(path), run_of(path), current())

    def export(self, checkpoint: Checkpoint, folder: Path, options: Mapping[str, str]) -> list[Path]:
        """Into `folder/checkpoints/`, so that `folder` can be named where a run directory is asked for."""
        ref = copy(checkpoint, storage_of_folder(folder.absolute()), options)
        return sorted(path for path in (folder / ref.folder).rglob("*") if path.is_file())

    def import_(self, source: Path, run: Path, options: Mapping[str, str]) -> str:
        """From a checkpoint's folder or a run directory into the storage of `run`."""
        return copy(open_checkpoint(source), storage_of_run(run), options).location
