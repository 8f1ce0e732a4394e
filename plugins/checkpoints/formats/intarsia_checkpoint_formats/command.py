"""`intarsia checkpoint list|show|verify|diff|export|import`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from intarsia import plugins
from intarsia.checkpoint import commit
from intarsia.checkpoint.commit import BASE
from intarsia.checkpoint.manifest import TensorRecord, describe
from intarsia.contracts import Box
from intarsia.errors import CheckpointError, UsageError

from intarsia_checkpoint_formats.reader import Checkpoint, open_checkpoint, storage_of_run

BLOCK_ELEMENTS = 1 << 22
"""Elements of a tensor that `diff` holds at once."""


class CheckpointCommand:
    """List, show, verify, compare, export and import checkpoints."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the actions."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|verify|diff|export|import")
        checkpoint = ("checkpoint", "CHECKPOINT", "a checkpoint's folder, or a run directory for its newest complete one")
        table: dict[str, tuple[str, tuple[tuple[str, str, str], ...]]] = {
            "list": ("the checkpoints of a run, and folders that are none, with reasons", (("run_directory", "RUN", "a run directory"),)),
            "show": ("what a checkpoint holds and what wrote it", (checkpoint,)),
            "verify": ("compare every file's hash; exit code 5 names each bad file", (checkpoint,)),
            "diff": ("compare keys, shapes, dtypes and values", (checkpoint, ("other", "OTHER", "the other checkpoint"))),
            "export": ("write weights or everything in another format", (checkpoint, ("folder", "FOLDER", "a new or empty folder"))),
            "import": (
                "make a checkpoint of a run from another format",
                (("folder", "SOURCE", "what to read"), ("run_directory", "RUN", "a run directory")),
            ),
        }
        for name, (text, positionals) in table.items():
            action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
            action.add_argument("--json", action="store_true", help="print JSON and nothing else to stdout")
            for positional, metavar, words in positionals:
                action.add_argument(positional, metavar=metavar, help=words)
            if name in ("export", "import"):
                flag = "--to" if name == "export" else "--from"
                action.add_argument(flag, dest="format", required=True, metavar="FORMAT", help="a checkpoint format, by name")
                action.add_argument(
                    "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the format; may be repeated"
                )

    def run(self, arguments: argparse.Namespace) -> int:
        """Do the chosen action."""
        facts, text, code = getattr(self, f"do_{arguments.action}")(arguments)
        print(json.dumps(facts, indent=2) if arguments.json else text)
        return code

    def do_list(self, arguments: argparse.Namespace) -> tuple[Any, str, int]:
        """Complete checkpoints, newest first, and the rest."""
        if not Path(arguments.run_directory).is_dir():
            raise UsageError(f"There is no run directory {arguments.run_directory!r}.")
        complete, skipped = commit.scan(storage_of_run(arguments.run_directory), BASE)
        facts = {"checkpoints": [dataclasses.asdict(ref) for ref in complete], "skipped": [dataclasses.asdict(entry) for entry in skipped]}
        lines = [f"{'step':>10}  {'saved':19}  {'size':>10}  location"] if complete else ["no complete checkpoint"]
        lines += [f"{ref.step:>10}  {clock(ref.time_s)}  {size(ref.size_bytes):>10}  {ref.location}" for ref in complete]
        return facts, "\n".join(lines + [f"not complete: {entry.folder}: {entry.reason}" for entry in skipped]), 0

    def do_show(self, arguments: argparse.Namespace) -> tuple[Any, str, int]:
        """The manifest without where its bytes lie."""
        opened = _opened(arguments.checkpoint)
        manifest, names = opened.manifest, ("step", "serial", "time_s", "world", "writer", "backend", "facts", "size_bytes")
        facts = {"location": opened.location, **{name: getattr(manifest, name) for name in names}}
        facts["tensors"] = {
            key: {"kind": t.kind, "shape": t.shape, "dtype": t.dtype, "pieces": len(t.pieces)} for key, t in manifest.tensors.items()
        }
        facts["values"] = {key: {"kind": record.kind, "value": record.value} for key, record in manifest.values.items()}
        lines = [
            f"{opened.location}: step {manifest.step}, {clock(manifest.time_s)}, {size(manifest.size_bytes)} in {count(len(manifest.files), 'file')}",
            f"written by {manifest.writer} with {count(manifest.world, 'process', 'es')}, backend {manifest.backend}, mesh {manifest.facts.get('mesh', {})}",
            f"recipe {manifest.facts.get('recipe', {}).get('name', '?')}, plugins "
            + ", ".join(f"{p.get('distribution')} {p.get('version')}" for p in manifest.facts.get("plugins", [])),
        ]
        lines += [
            f"  {key:60} {t.dtype:10} {list(t.shape)}{'' if t.kind == 'tensor' else f'  {t.kind}'}"
            for key, t in sorted(manifest.tensors.items())
        ]
        lines += [f"  {key:60} {record.kind:10} {describe(record.value)}" for key, record in sorted(manifest.values.items())]
        return facts, "\n".join(lines), 0

    def do_verify(self, arguments: argparse.Namespace) -> tuple[Any, str, int]:
        """Hash everything."""
        opened = _opened(arguments.checkpoint)
        problems = opened.verify()
        facts = {
            "location": opened.location,
            "files": len(opened.manifest.files),
            "problems": [{"file": f, "reason": r} for f, r in problems],
        }
        good = (
            f"{opened.location}: {count(len(opened.manifest.files), 'file')}, {size(opened.manifest.size_bytes)}, all as they were written"
        )
        text = "\n".join(f"{opened.location}/{file}: {reason}" for file, reason in problems) or good
        return facts, text, CheckpointError.exit_code if problems else 0

    def do_diff(self, arguments: argparse.Namespace) -> tuple[Any, str, int]:
        """What differs, key by key."""
        one, other = _opened(arguments.checkpoint), _opened(arguments.other)
        differences = []
        for key in sorted({*one.keys(), *other.keys()}):
            said = difference(one, other, key)
            if said:
                differences.append({"key": key, **said})
        lines = [f"{d['key']}: {d['what']}" for d in differences] or ["equal in every key and value"]
        return {"equal": not differences, "differences": differences}, "\n".join(lines), 0

    def do_export(self, arguments: argparse.Namespace) -> tuple[Any, str, int]:
        """Hand the checkpoint to the format."""
        folder = Path(arguments.folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is not empty. Export into a new or empty folder.")
        files = find_format(arguments.format).export(_opened(arguments.checkpoint), folder, options(arguments.option))
        return {"files": [str(file) for file in files]}, "\n".join(f"wrote {file}" for file in files), 0

    def do_import(self, arguments: argparse.Namespace) -> tuple[Any, str, int]:
        """Have the format make a checkpoint."""
        location = find_format(arguments.format).import_(Path(arguments.folder), Path(arguments.run_directory), options(arguments.option))
        return {"location": location}, f"wrote {location}", 0


def _opened(path: str) -> Checkpoint:
    if not Path(path).expanduser().exists():
        raise UsageError(f"There is nothing at {path}.")
    return open_checkpoint(path)


command = CheckpointCommand()


def find_format(name: str) -> Any:
    """The chosen format."""
    entry = plugins.current().registry("checkpoint format").find(name)
    return plugins.current().target(entry)()


def options(texts: list[str]) -> dict[str, str]:
    """`NAME=VALUE` as a dict."""
    for text in texts:
        if "=" not in text:
            raise UsageError(f"--option {text!r} must be NAME=VALUE.")
    return dict(text.split("=", 1) for text in texts)


def difference(one: Checkpoint, other: Checkpoint, key: str) -> dict[str, Any] | None:
    """How a key differs: `what` in words, and `max_abs` where two tensors of one shape do. None where it does not."""
    sides = [opened.manifest.tensors.get(key) or opened.manifest.values.get(key) for opened in (one, other)]
    a, b = sides
    if a is None or b is None:
        return {"what": f"only in {(one if b is None else other).location}"}
    if not isinstance(a, TensorRecord) or not isinstance(b, TensorRecord):
        values = [describe(side.value) if not isinstance(side, TensorRecord) else f"a tensor {list(side.shape)}" for side in (a, b)]
        return None if a == b else {"what": f"{values[0]} and {values[1]}"}
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return {"what": f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"}
    import torch

    unequal, largest = 0, 0.0
    for box in blocks(a):
        left, right = one.read(key, box), other.read(key, box)
        # Bits are compared, so that a NaN equals itself; a gap that is no number (NaN against a number) shows as nan.
        differs = (left.view(-1, 1).view(torch.uint8) != right.view(-1, 1).view(torch.uint8)).any(1) if left.numel() else left.bool()
        if differs.any():
            wide = torch.complex128 if left.is_complex() else torch.float64
            gap = (left.to(wide) - right.to(wide)).abs().reshape(-1)[differs].max().item()
            unequal, largest = unequal + int(differs.sum()), gap if gap != gap else max(largest, gap)
    return (
        {"what": f"{unequal} of {a.numel} elements differ, by at most {largest:.6g}", "unequal": unequal, "max_abs": largest}
        if unequal
        else None
    )


def blocks(record: TensorRecord) -> list[Box]:
    """Boxes of some rows each that make up a tensor."""
    if not record.shape or record.numel == 0:
        return [Box.whole(record.shape)]
    rows = max(1, BLOCK_ELEMENTS * record.shape[0] // record.numel)
    starts = range(0, record.shape[0], rows)
    return [Box((start, *(0,) * (len(record.shape) - 1)), (min(rows, record.shape[0] - start), *record.shape[1:])) for start in starts]


def clock(time_s: float) -> str:
    """A moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def count(number: int, what: str, plural: str = "s") -> str:
    """`1 file`, `2 files`."""
    return f"{number} {what}{plural if number != 1 else ''}"


def size(amount: float) -> str:
    """Bytes for people."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, (int(amount).bit_length() - 1) // 10))
    return f"{amount / 1024**power:.{1 if power else 0}f} {units[power]}"
