"""The run directory: who may use it, and the files that say what the run is. Torch-free."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from intarsia.errors import UsageError

LOCK = "run.lock"
RECIPE, RESOLVED, PLUGINS = "recipe.json", "resolved.json", "plugins.json"
FOLDERS = ("metrics", "traces", "checkpoints")

logger = logging.getLogger("intarsia.train")


def is_run(directory: Path) -> bool:
    """Whether `directory` holds a run."""
    return (directory / RECIPE).is_file()


def has_begun(directory: Path) -> bool:
    """Whether a run in `directory` got as far as a step or a checkpoint; what a failed build left may be replaced."""
    events = directory / "events.jsonl"
    return any((directory / "checkpoints").glob("*")) or (events.is_file() and '"event": "step"' in events.read_text(encoding="utf-8"))


def default_directory(name: str, parent: Path = Path("runs")) -> Path:
    """A new directory for a run of this name: `runs/NAME-DATE-TIME`, with a number behind where that exists."""
    base = parent / f"{name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


class RunDirectory:
    """A run's own directory, held by a lock while the run is alive."""

    def __init__(self, path: Path):
        self.path = path
        self._handle: int | None = None

    def create(self, resume: bool) -> None:
        """Make the directory (or, to resume, find it) and take its lock. Raises UsageError: in use, existing, missing, not writable."""
        if resume and not is_run(self.path):
            raise UsageError(f"{self.path} is no run directory (it has no {RECIPE}), so there is nothing to resume.")
        if not resume and is_run(self.path) and has_begun(self.path):
            raise UsageError(
                f"{self.path} holds a run already. Go on with it by `--resume {self.path}`, or choose another directory by --dir or --name."
            )
        try:
            for folder in FOLDERS:
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            self._lock()
        except OSError as error:
            raise UsageError(f"Cannot use {self.path} as a run directory: {error.strerror or error}.") from error

    def _lock(self) -> None:
        """Hold an advisory lock on the file: the system gives it back whenever and however the process ends, so it is never stale."""
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 1000).decode(errors="replace").strip() or "an unknown process"
            os.close(handle)
            raise UsageError(f"{self.path} is in use by another run: {holder} holds {self.path / LOCK}. Wait for it, or stop it.") from None
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):
                raise
            logger.warning("%s: this file system has no locks (%s); nothing stops a second run from using it.", self.path, error.strerror)
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        self._handle = handle

    def release(self) -> None:
        """Give the lock back."""
        if self._handle is not None:
            os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = None

    def write(self, name: str, value: Any) -> None:
        """Replace one of the JSON files at once."""
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        aside = self.path / f".{name}.new"
        try:
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, self.path / name)
        except OSError as error:
            raise UsageError(f"Cannot write {self.path / name}: {error.strerror or error}.") from error
