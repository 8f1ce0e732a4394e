"""Plain weights as safetensors: `model.safetensors`, or shards with `model.safetensors.index.json`, named as others read them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import safetensors
import torch
from intarsia.checkpoint.commit import BASE, find_backend
from intarsia.checkpoint.manifest import TensorRecord
from intarsia.checkpoint.staging import dtype_name
from intarsia.errors import CheckpointError, UsageError
from intarsia.layout import DTYPE_BYTES
from intarsia.plugins import current
from safetensors.torch import save_file

from intarsia_checkpoint_formats.native import check_options
from intarsia_checkpoint_formats.reader import Checkpoint, storage_of_run
from intarsia_checkpoint_formats.writer import write_checkpoint

HEADER_BYTES = 50 << 20
"""Upper bound of what a shard's header is let grow to; readers refuse headers above 100,000,000 bytes."""

ENTRY_BYTES = 200
"""Header bytes of one tensor besides its name, at most."""

INDEX = "model.safetensors.index.json"


def shards(records: Sequence[TensorRecord], sizes: Mapping[str, int], shard_bytes: int) -> Iterator[list[TensorRecord]]:
    """Records in files of about `shard_bytes`, none with a header that is too long."""
    group: list[TensorRecord] = []
    data = header = 0
    for record in records:
        entry = len(json.dumps(record.name)) + ENTRY_BYTES
        if group and (data + sizes[record.key] > shard_bytes or header + entry > HEADER_BYTES):
            yield group
            group, data, header = [], 0, 0
        group.append(record)
        data, header = data + sizes[record.key], header + entry
    if group:
        yield group


class SafetensorsFormat:
    """See `intarsia.contracts.CheckpointFormat`. Memory: one shard."""

    def export(self, checkpoint: Checkpoint, folder: Path, options: Mapping[str, str]) -> list[Path]:
        """Tensors of one owner (`owner`, default `model`), by their own names; `dtype` converts, `shard_bytes` bounds a file (default 4 GiB)."""
        check_options(options, ("owner", "shard_bytes", "dtype"))
        owner, limit = options.get("owner", "model"), whole_number(options.get("shard_bytes", str(4 << 30)))
        if options.get("dtype") is not None and options["dtype"] not in DTYPE_BYTES:
            raise UsageError(f"Unknown dtype {options['dtype']!r}. Known: {', '.join(DTYPE_BYTES)}.")
        records = [r for r in checkpoint.manifest.tensors.values() if r.owner == owner and r.kind != "rank"]
        if not records:
            owners = sorted({record.owner for record in checkpoint.manifest.tensors.values()})
            raise UsageError(f"{checkpoint.location} has no tensors of the owner {owner!r}. Owners: {', '.join(owners) or 'none'}.")
        sizes = {record.key: math.prod(record.shape) * DTYPE_BYTES[options.get("dtype", record.dtype)] for record in records}
        groups = list(shards(sorted(records, key=lambda record: record.name), sizes, limit))
        folder.mkdir(parents=True, exist_ok=True)
        files, places = [], {}
        for number, group in enumerate(groups, 1):
            name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            tensors = {record.name: self.converted(checkpoint.read(record.key), options) for record in group}
            try:
                save_file(tensors, folder / name, {"format": "pt"})
            except (KeyError, safetensors.SafetensorError) as error:
                raise UsageError(
                    f"safetensors cannot hold these tensors ({error}); choose another dtype by --option dtype=NAME."
                ) from error
            places.update({record.name: name for record in group})
            files.append(folder / name)
        if len(groups) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
            files.append(folder / INDEX)
        return files

    def converted(self, tensor: torch.Tensor, options: Mapping[str, str]) -> torch.Tensor:
        """In the wanted dtype."""
        return tensor.to(getattr(torch, options["dtype"])) if "dtype" in options else tensor

    def import_(self, source: Path, run: Path, options: Mapping[str, str]) -> str:
        """A checkpoint of step 0 with all tensors of a file, or of the files of a folder, as weights of `owner` (default `model`)."""
        check_options(options, ("owner", "backend"))
        files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{source} has no .safetensors file.")
        owner, heads = options.get("owner", "model"), []
        homes: dict[str, Path] = {}
        for file in files:
            try:
                with safetensors.safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                        if name in homes:
                            raise CheckpointError(f"{file}: the tensor {name!r} is in {homes[name].name} as well.")
                        homes[name], part = file, opened.get_slice(name)
                        dtype = dtype_name(opened.get_tensor(name).dtype if not part.get_shape() else part[:0].dtype, name)
                        heads.append(TensorRecord(owner, name, "tensor", 1, tuple(part.get_shape()), dtype, ()))
            except (safetensors.SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is not a sound safetensors file: {error}.") from error
        self.check_index(source, set(homes))
        entry = current().registry("checkpoint backend").find(options.get("backend", "stream"))

        def make(record: TensorRecord) -> torch.Tensor:
            with safetensors.safe_open(homes[record.name], framework="pt") as opened:
                return opened.get_tensor(record.name)

        backend = entry.full_name, find_backend(entry.full_name, current())
        return write_checkpoint(storage_of_run(run), BASE, backend, 0, heads, make, facts={"imported_from": str(source)}).location

    def check_index(self, source: Path, names: set[str]) -> None:
        """Where there is an index, exactly the tensors that it lists must be there."""
        file = source / INDEX
        if source.is_dir() and file.exists():
            try:
                listed = set(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{file} is not an index of safetensors files: {error}.") from error
            if listed != names:
                lost, surplus = sorted(listed - names)[:5], sorted(names - listed)[:5]
                raise CheckpointError(f"{file} does not fit the files beside it: listed only {lost}, in files only {surplus}.")


def whole_number(text: str) -> int:
    """A positive number of bytes."""
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"shard_bytes must be a positive number of bytes, is {text!r}.")
    return int(text)
