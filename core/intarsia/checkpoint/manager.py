"""Saves in the background, loads at any mesh, keeps what must be kept.

`save` copies the state and returns; a thread of its own writes it. That thread calls no collective: ranks meet through files of the
storage (see `commit`). A save that failed is raised on the main thread at the next `poll`, `save`, `wait` or `close`, with its step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from intarsia import __version__
from intarsia.checkpoint import commit
from intarsia.checkpoint.commit import BASE, CheckpointRef, Skipped, find_backend
from intarsia.checkpoint.loading import compare_items, compare_keys, fill
from intarsia.checkpoint.manifest import encode
from intarsia.checkpoint.staging import Staged, collect, plain, stage
from intarsia.contracts import CheckpointBackend, Stateful, Storage
from intarsia.errors import CheckpointError, IntarsiaError

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.config import CheckpointConfig
    from intarsia.plugins import Plugins

log = logging.getLogger("intarsia.checkpoint")

# Saves that may exist at once: one being written, one waiting. A further `save` waits: each holds a copy of the state.
IN_FLIGHT = 2


class CheckpointManager:
    """The checkpoints of one run. Stability: provisional.

    `directory` is the run directory, `comm` spans all ranks. `facts` go into the manifest as they are when a save is made (see
    `compare_facts`); `facts["mesh"]` has the sizes of the mesh's axes, outermost first. `exclusive` says that the caller holds the
    run's lock, so that what unfinished saves of others left is a leftover. Construction is collective. Rank 0 waits `timeout_s` for the others' parts.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        directory: str | os.PathLike[str],
        comm: Communicator,
        plugins: Plugins,
        facts: dict[str, Any],
        *,
        exclusive: bool = False,
        timeout_s: float = 600.0,
    ):
        self.config, self.comm, self.facts = config, comm, facts
        self.storage: Storage = plugins.build(config.storage, directory)
        self.backend: CheckpointBackend = plugins.build(config.backend)
        self.backend_name = plugins.entry_of(config.backend).full_name
        self._plugins, self._exclusive, self._timeout_s = plugins, exclusive, timeout_s
        self._token = comm.gather_json(commit.temporary_token(secrets.token_hex(6)), what="checkpoint session")[0]
        self.skipped: list[Skipped] = []
        self._durable: CheckpointRef | None = None
        self._loading: str | None = None
        self._callbacks: list[Callable[[int, str], None]] = []
        self._error_callbacks: list[Callable[[int, BaseException], None]] = []
        self._condition = threading.Condition()
        self._queue: deque[tuple[int, Staged, dict[str, Any]]] = deque()
        self._finished: deque[tuple[int, str, BaseException | None]] = deque()
        self._saves = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ saving

    def save(self, step: int, components: Sequence[Stateful]) -> None:
        """Take the state after `step` finished steps, on every rank. Returns when it is copied, or written where `background` is off.

        No collective. Raises the error of an earlier save, and waits where `IN_FLIGHT` saves are under way.
        """
        self.poll()
        with self._condition:
            self._condition.wait_for(lambda: len(self._queue) < IN_FLIGHT)
        self.poll()
        if self._closed:
            raise CheckpointError(f"The checkpoint of step {step} cannot be saved: the checkpoint manager is closed.")
        items = collect(components)
        staged = stage((item for _, item in items.values()), step, self.comm.rank, self.comm.size, self._mesh())
        with self._condition:
            self._saves += 1
            self._queue.append((self._saves, staged, plain(self.facts, "facts")))
            if self._thread is None:
                # A daemon: an interpreter that ends by an error must not hang on ranks that are gone. An orderly end calls close().
                self._thread = threading.Thread(target=self._write_all, name="intarsia-checkpoint", daemon=True)
                self._thread.start()
            self._condition.notify_all()
        if not self.config.background:
            self._drain()
            self.poll()

    def poll(self) -> None:
        """Report finished saves to the callbacks; raise the first that failed. Cheap: call it at every step, on every rank."""
        while self._finished:
            step, location, error = self._finished.popleft()
            if error is not None:
                for on_error in self._error_callbacks:
                    on_error(step, error)
                raise error
            for on_durable in self._callbacks if location else ():
                on_durable(step, location)

    def wait(self) -> None:
        """Until every save is durable, on all ranks: a collective. A failure on any rank is raised on all."""
        self._drain()
        failure: BaseException | None = None
        try:
            self.poll()
        except CheckpointError as error:
            failure = error
        self._agree([str(failure)] if failure else [], failure)

    def close(self, abandon: bool = False) -> None:
        """Finish the saves under way (`abandon`: leave them, since other ranks are gone) and raise what failed. No collective; may be called twice."""
        if not abandon:
            self._drain()
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not None and not abandon:
            self._thread.join()
        self.poll()

    def on_durable(self, callback: Callable[[int, str], None]) -> None:
        """Have `callback(step, location)` called on rank 0's main thread when a save has become durable."""
        self._callbacks.append(callback)

    def on_error(self, callback: Callable[[int, BaseException], None]) -> None:
        """Have `callback(step, error)` called on the main thread before a failed save is raised."""
        self._error_callbacks.append(callback)

    def _drain(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._queue)

    def _mesh(self) -> dict[str, int]:
        return {name: size for name, size in self.facts.get("mesh", {}).items() if size != 1}

    def _remains(self) -> str:
        last = self._durable
        here = (
            f"The checkpoint of step {last.step} ({last.location}) is complete and stays."
            if last
            else "No complete checkpoint is known here."
        )
        return "" if self.comm.rank else here  # What other ranks report becomes a part of what rank 0 tells.

    def _write_all(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                number, staged, facts = self._queue[0]
            location, failure = "", None
            try:
                location = self._write(number, staged, facts)
            except BaseException as error:
                failure = error
            with self._condition:
                # Only now are the buffers let go of and the next save begins.
                self._finished.append((staged.step, location, failure))
                self._queue.popleft()
                del staged
                self._condition.notify_all()

    def _write(self, number: int, staged: Staged, facts: dict[str, Any]) -> str:
        """Write one save on the background thread; rank 0 commits it and returns where it is."""
        storage, rank, step = self.storage, self.comm.rank, staged.step
        temporary = commit.temporary_folder(BASE, self._token, number, step)
        action = "copying off the device"
        try:
            with commit.explain(step, storage, lambda: action, self._remains):
                staged.finish_copies()
                action = "writing tensors"
                written = self.backend.write(storage, temporary, rank, staged.tensors)
                action = "writing what this rank wrote"
                commit.write_file(
                    storage, commit.part_name(temporary, rank), encode(commit.part_json(written, staged.heads(), staged.values))
                )
                if rank:
                    return ""
                action = "waiting for the other ranks"
                parts = commit.wait_for_parts(storage, temporary, self.comm.size, self._timeout_s)
                action = "committing"
                head = {
                    "step": step,
                    "world": self.comm.size,
                    "writer": f"intarsia {__version__}",
                    "backend": self.backend_name,
                    "facts": facts,
                }
                self._durable = commit.publish(storage, BASE, temporary, head, parts)
        except Exception as error:
            with contextlib.suppress(Exception):
                if rank:
                    commit.write_file(storage, commit.part_name(temporary, rank), encode({"error": str(error)}))
                else:
                    storage.remove(temporary)
            raise
        self._tidy(number)
        return self._durable.location

    def _tidy(self, number: int) -> None:
        """Retention, once the new checkpoint is durable. What cannot be deleted is no reason to end a run."""
        assert self._durable is not None
        keep = {self._durable.folder, self._loading or ""}
        try:
            commit.purge(self.storage, BASE, self.config.keep_last, self.config.keep_every, keep)
            commit.clean(self.storage, BASE, self._token, number, self._exclusive)
        except (OSError, CheckpointError) as error:
            log.warning("Old checkpoints in %s/%s could not be deleted: %s", self.storage.describe(), BASE, error)

    # ------------------------------------------------------------ loading

    def latest(self, verify: bool = True) -> CheckpointRef | None:
        """The newest complete checkpoint, the same on all ranks (a collective); None when there is none. `skipped` lists the others, with reasons.

        `verify` compares every file's hash, the files shared out over the ranks; a damaged checkpoint is skipped as well. A
        checkpoint in a newer format is an error.
        """
        found: list[Any] = [None, [], []]
        if self.comm.rank == 0:
            try:
                complete, skipped = commit.scan(self.storage, BASE)
                found = [None, [dataclasses.asdict(ref) for ref in complete], [dataclasses.asdict(entry) for entry in skipped]]
            except (CheckpointError, OSError) as error:
                found[0] = f"{self.storage.describe()}/{BASE} cannot be listed: {error}"
        failure, complete_json, skipped_json = self.comm.gather_json(found, what="checkpoint list")[0]
        if failure:
            raise CheckpointError(failure)
        self.skipped = [Skipped(**entry) for entry in skipped_json]
        commit.refuse_newer(self.skipped)
        for ref in (CheckpointRef(**entry) for entry in complete_json):
            problems = self._verify(ref) if verify else []
            if not problems:
                self._durable = dataclasses.replace(ref, verified=verify)
                return self._durable
            self.skipped.append(Skipped(ref.folder, "; ".join(problems)))
        return None

    def _verify(self, ref: CheckpointRef) -> list[str]:
        """What is wrong with a checkpoint's files, each hashed by one rank. A collective."""
        mine = []
        try:
            files = list(commit.load_manifest(self.storage, ref.folder).files.values())[self.comm.rank :: self.comm.size]
            mine = [
                f"{file.name} {problem}" for file in files if (problem := commit.check_file(self.storage, ref.folder, file, hashes=True))
            ]
        except (CheckpointError, OSError) as error:
            mine = [str(error)]
        return [problem for problems in self.comm.gather_json(mine, what="checkpoint hashes") for problem in problems]

    def load(
        self,
        ref: CheckpointRef,
        components: Sequence[Stateful],
        allow_missing: Sequence[str] = (),
        allow_unexpected: Sequence[str] = (),
        allow_dtype: Sequence[str] = (),
        verify: bool = True,
    ) -> int:
        """Fill the components from `ref`, whatever mesh wrote it, and return its step. A collective; an error on one rank is raised on all.

        Strict: every item of the components must be in the checkpoint and the other way round, with equal kind, shape and dtype. The
        globs list exceptions by key (`optimizer/*.momentum`); an item that may be missing keeps its value. Nothing is
        changed before everything was checked, hashes included.
        """
        self._loading = ref.folder
        try:
            return self._load(ref, components, (allow_missing, allow_unexpected), allow_dtype, verify and not ref.verified)
        finally:
            self._loading = None

    def _load(
        self,
        ref: CheckpointRef,
        components: Sequence[Stateful],
        allow: tuple[Sequence[str], Sequence[str]],
        allow_dtype: Sequence[str],
        verify: bool,
    ) -> int:
        problems = self._verify(ref) if verify else []
        if problems:
            raise CheckpointError(f"{ref.location} is damaged: {'; '.join(problems)}. Load an older one, or restore these files.")
        place = self.comm.rank, self.comm.size, self._mesh()
        items = collect(components)
        everywhere = {key for keys in self.comm.gather_json(sorted(items), what="checkpoint keys") for key in keys}
        manifest, same_mesh = None, False
        try:
            manifest = commit.load_manifest(self.storage, ref.folder)
            saved_mesh = {name: size for name, size in manifest.facts.get("mesh", {}).items() if size != 1}
            same_mesh = manifest.world == self.comm.size and saved_mesh == self._mesh()
            wrong = compare_keys(manifest, [key for key, (_, item) in items.items() if same_mesh or item.kind != "rank"], everywhere, allow)
            wrong += compare_items(manifest, items, allow_dtype)
            if wrong:
                hint = f"Undo what was changed since it was saved, or begin a new run with its weights: --init-from {ref.location}"
                problems = ["\n".join([f"{ref.location} does not fit this run:", *wrong, hint])]
        except (CheckpointError, OSError) as error:
            problems = [str(error)]
        self._agree(problems)
        assert manifest is not None
        failure: BaseException | None = None
        loaded: list[tuple[Stateful, dict[str, Any]]] = []
        try:
            backend = self.backend if manifest.backend == self.backend_name else find_backend(manifest.backend, self._plugins)
            loaded = fill(manifest, items, self.storage, backend, ref.folder, place, same_mesh)
        except (IntarsiaError, OSError) as error:
            failure = error
        self._agree([f"{ref.location} could not be read: {failure}"] if failure else [])
        for component, values in loaded:
            rank_items = [item.name for owner, item in items.values() if owner is component and item.kind == "rank"]
            try:
                component.load_state(values, missing_rank_state=any(name not in values for name in rank_items))
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(
                    f"{ref.location}: {', '.join(values)} cannot be taken up by {type(component).__name__} ({type(error).__name__}: {error}). "
                    "The values were changed, or saved by another version."
                ) from error
        self._durable = ref
        return manifest.step

    def _agree(self, problems: list[str], own: BaseException | None = None) -> None:
        """Raise on every rank where any rank has a problem. A collective."""
        by_rank = self.comm.gather_json(problems, what="checkpoint problems")
        if own is not None:
            raise own
        for rank, texts in enumerate(by_rank):
            if texts:
                raise CheckpointError(texts[0] if rank == self.comm.rank else f"{texts[0]} (on rank {rank})")
