"""Where a checkpoint's bytes go, and what gives them their format. Torch-free at import."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from intarsia.checkpoint.manifest import Manifest
    from intarsia.config import ModelConfig, TokenizerConfig
    from intarsia.contracts.placement import Box
    from intarsia.contracts.state import StateItem


# Suffix that a storage may give to a file that is still being written; no name has it.
PARTIAL = ".partial"


def check_name(name: str) -> str:
    """`name` itself, or ValueError where it is no relative `/`-separated name without `.`, `..`, backslash and NUL. Stability: stable."""
    parts = name.split("/")
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts) or name.endswith(PARTIAL):
        raise ValueError(
            f"{name!r} is not a storage name: relative, parts separated by one '/', no '.', '..', backslash or NUL, not ending in {PARTIAL!r}"
        )
    return name


@runtime_checkable
class Writer(Protocol):
    """An open file of a Storage. Stability: stable."""

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`, or raise."""

    def close(self) -> None:
        """Make everything durable (fsync) and close. Only after this returns may the file be published."""

    def abort(self) -> None:
        """Close and forget; the file need not exist afterwards. Never raises."""


@runtime_checkable
class Storage(Protocol):
    """A tree of named files. Stability: stable.

    Names are relative, `/`-separated, without `..`. Failing operations raise OSError (FileNotFoundError where a name is
    missing); the caller adds what it was doing. Methods may be called from several threads and processes.
    """

    def describe(self) -> str:
        """Where this is, for messages (`/data/runs/a` or `s3://bucket/a`)."""

    def open(self, name: str) -> Writer:
        """Create `name` (and its parents), replacing any earlier one."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """`length` bytes from `offset` (to the end when None); fewer only at the end of the file."""

    def size(self, name: str) -> int:
        """Bytes in `name`."""

    def list(self, prefix: str = "") -> list[str]:
        """All file names under the folder `prefix`, sorted, relative to the root of the storage. [] when there is none."""

    def publish(self, source: str, destination: str) -> None:
        """Move the folder `source` to `destination` durably. Afterwards `destination` is whole; if it is interrupted the commit marker, which
        is written after publish, is missing. Raises FileExistsError when `destination` has files."""

    def remove(self, prefix: str) -> None:
        """Delete a file, or a folder and all under it; missing ones are ignored."""


@runtime_checkable
class HasFolders(Protocol):
    """A Storage where a crash leaves folders without a finished file, which `list` cannot show. Optional: by it they are found and deleted. Stability: provisional."""

    def folders(self, prefix: str = "") -> list[str]:
        """Names, without `prefix`, of the folders directly below the folder `prefix`, whatever they hold; [] when there is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one tensor: box `box_start`, `box_size` of global tensor `key`, row-major, at `offset` in `file`. Stability: provisional."""

    key: str
    box_start: tuple[int, ...]
    box_size: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class FileRecord:
    """One data file: name relative to the checkpoint, size, and its SHA-256. Stability: provisional."""

    name: str
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenPart:
    """What one rank wrote. Stability: provisional."""

    files: tuple[FileRecord, ...]
    pieces: tuple[Piece, ...]


@runtime_checkable
class CheckpointBackend(Protocol):
    """The format of a checkpoint's data files. Manifest, hashes, commit, retention and resharding arithmetic are core's. Stability: provisional."""

    def write(self, storage: Storage, folder: str, rank: int, tensors: Iterable[tuple[StateItem, Any]]) -> WrittenPart:
        """Write this rank's primary pieces. `tensors` pairs each item with the list of (Box, contiguous CPU tensor) to write, which
        belong to the save until it ends; it is iterated once, and may make each tensor only when its turn comes. Runs in the background, without collectives. Files are made under `folder`, named so that no other
        rank's can clash."""

    def read(self, storage: Storage, folder: str, pieces: Sequence[Piece], deliver: Callable[[Piece, memoryview], None]) -> None:
        """Read the listed pieces in any order and hand each one's bytes to `deliver`."""


class CheckpointReader(Protocol):
    """A complete checkpoint, to read. Stability: provisional."""

    location: str
    manifest: Manifest

    def value(self, key: str) -> Any:
        """The JSON value of an item."""

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """A new CPU tensor with `box` (None: all) of a stored tensor, in the stored dtype."""


@runtime_checkable
class CheckpointFormat(Protocol):
    """A foreign format of weights or whole states, for `intarsia checkpoint export` and `import`. Built by `target()`. Stability: provisional.

    `options` are the command's `--option NAME=VALUE`; unknown names are a UsageError. What one direction cannot do is a UsageError that says so.
    """

    def export(self, checkpoint: CheckpointReader, folder: Path, options: Mapping[str, str]) -> list[Path]:
        """Write the checkpoint into the new or empty `folder`, a tensor at a time. Returns the files."""

    def import_(self, source: Path, run: Path, options: Mapping[str, str]) -> str:
        """Commit what is in `source` as the newest checkpoint of the run directory `run`. Returns where it is."""


class WeightReader(Protocol):
    """A model's weights by canonical parameter name, any box of any of them. Stability: provisional.

    A reader may have two things more: `processor`, the config of what turns images into patches for this model (None: not known), and `remarks(recipe)`, sentences on what a run of this recipe, which
    begins with the weights, does otherwise than they were made for, apart from the model.
    """

    @property
    def location(self) -> str:
        """Where they are, for messages."""

    @property
    def model(self) -> ModelConfig:
        """The config of the model that they are of. UsageError where they do not say."""

    @property
    def tokenizer(self) -> TokenizerConfig | None:
        """The tokenizer that goes with them, if it is known."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a text, besides the tokenizer's own."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shapes of all parameters, and of persistent buffers where there are any."""

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A new CPU tensor with `box` (None: all) of a parameter, in the stored dtype. Reads little more than the box."""


@runtime_checkable
class WeightFormat(Protocol):
    """A CheckpointFormat whose folders can be trained from and run directly. Stability: provisional.

    `looks_for` says for messages what makes a folder one of these.
    """

    looks_for: str

    def recognises(self, path: Path) -> bool:
        """Whether `path` looks like this format; cheap, and without a look at the weights."""

    def open_weights(self, path: Path) -> WeightReader:
        """The weights in it. CheckpointError or UsageError for what is wrong with it."""


JSONObject = Mapping[str, Any]
