"""The checkpoint format `hf`: a folder that transformers and others load, written from a checkpoint and read into one, a block of a tensor at a time."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import chz
import torch
from intarsia.checkpoint.commit import BASE, find_backend
from intarsia.checkpoint.manifest import TensorRecord
from intarsia.checkpoint.weights import model_differences
from intarsia.config import Recipe, Resolution, Resolved, TokenizerConfig, flatten, load_saved, resolve
from intarsia.config.checks import check
from intarsia.contracts import Box, ModelEntry, StateKind
from intarsia.errors import CheckpointError, NumericsError, UsageError, did_you_mean
from intarsia.parameters import persistent_buffers
from intarsia.plugins import current, import_reference
from intarsia_checkpoint_formats.reader import Checkpoint, storage_of_run
from intarsia_checkpoint_formats.weights import CheckpointWeights
from intarsia_checkpoint_formats.writer import write_checkpoint
from torch import Tensor

from intarsia_huggingface.boxes import write_box
from intarsia_huggingface.config import TokenizerJsonConfig
from intarsia_huggingface.folder import CONFIG, FLOATING, INDEX, SINGLE, HFFolder, row_boxes, rows_of, table_of
from intarsia_huggingface.ops import steps_of
from intarsia_huggingface.processors import differences, files_of, log, processor_of, with_processor
from intarsia_huggingface.rules import Row, choose, to_theirs, whole_numbers
from intarsia_huggingface.safetensors_file import Head, check_dtype, shards, write_file

SHARD_BYTES = 5 * 10**9
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class HFFormat:
    """See `intarsia.contracts.CheckpointFormat` and `WeightFormat`."""

    looks_for = f"{CONFIG} and *.safetensors"

    def recognises(self, path: Path) -> bool:
        """A folder with a config.json."""
        return (path / CONFIG).is_file()

    def open_weights(self, path: Path) -> HFFolder:
        """The weights in a folder, checked."""
        return HFFolder(path, current())

    # ------------------------------------------------------------ export

    def export(self, checkpoint: Checkpoint, folder: Path, options: Mapping[str, str]) -> list[Path]:
        """Write `model*.safetensors`, `config.json` and the files of the tokenizer and of the processor of images, where there are some.

        Options: `dtype` (default: as stored), `shard_size` (default 5GB). config.json is written last: a folder without it is not whole.
        """
        _check_options(options, ("dtype", "shard_size"))
        limit = parse_size(options.get("shard_size", str(SHARD_BYTES)))
        weights = CheckpointWeights(checkpoint, _run_of(checkpoint), current())
        dtype = options.get("dtype")
        if dtype is not None and dtype not in FLOATING:
            raise UsageError(f"Weights cannot be in dtype {dtype!r}. {did_you_mean(dtype, FLOATING)}")
        writer = Export(weights, dtype)
        folder.mkdir(parents=True, exist_ok=True)
        groups = list(shards(writer.heads(), limit))
        files, places = [], {}
        for number, group in enumerate(groups, 1):
            name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            write_file(folder / name, group, writer.blocks)
            places.update({head.name: name for head in group})
            files.append(folder / name)
        if len(groups) > 1:
            total = sum(head.length for group in groups for head in group)
            files.append(_write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places}))
        files += _copy_tokenizer(weights.tokenizer, folder)
        described = files_of(writer.table, weights.model, processor_of(weights.recipe))
        files += [_write_json(folder / name, content) for name, content in described.items()]
        files.append(_write_json(folder / CONFIG, writer.config))
        return files

    # ------------------------------------------------------------ import

    def import_(self, source: Path, run: Path, options: Mapping[str, str]) -> str:
        """Make the weights in `source` a checkpoint of step 0 of `run`, whose recipe says the same model. Where `run` is no run directory yet it
        becomes one: the option `recipe` names the recipe that it gets, with the folder's model and tokenizer in it.

        Options: `recipe`, `dtype` (default: the recipe's precision.master), `backend` (default stream).
        """
        _check_options(options, ("recipe", "dtype", "backend"))
        folder = self.open_weights(source)
        resolved = self._recipe_of(run, folder, options)
        plugins = current()
        dtype = options.get("dtype", resolved.recipe.precision.master)
        if dtype not in FLOATING:
            raise UsageError(f"Weights cannot be in dtype {dtype!r}. {did_you_mean(dtype, FLOATING)}")
        kinds: dict[str, tuple[StateKind, str]] = {name: ("replicated", kept) for name, kept in folder.buffers.items()}
        heads = [
            TensorRecord("model", name, kind, 1, shape, stored, ())
            for name, shape in folder.shapes().items()
            for kind, stored in [kinds.get(name, ("tensor", dtype))]
        ]
        entry = plugins.registry("checkpoint backend").find(options.get("backend", "stream"))

        def make(record: TensorRecord) -> Tensor:
            return converted(folder.read(record.name), record.dtype, record.name)

        values = {path: fact["value"] for path, fact in resolved.resolved_json()["values"].items()}
        facts = {"recipe": values, "plugins": plugins.facts(), "world": 1, "mesh": {}, "imported_from": str(source)}
        if not (run / "recipe.json").exists():
            run.mkdir(parents=True, exist_ok=True)
            _write_json(run / "recipe.json", resolved.recipe_json())
        backend = entry.full_name, find_backend(entry.full_name, plugins)
        return write_checkpoint(storage_of_run(run), BASE, backend, 0, heads, make, facts=facts).location

    def _recipe_of(self, run: Path, folder: HFFolder, options: Mapping[str, str]) -> Resolved:
        """The run's recipe, which must have the folder's model, or the recipe of a run to be made."""
        if (run / "recipe.json").exists():
            if "recipe" in options:
                raise UsageError(f"{run} has a recipe already: leave out --option recipe, or import into a new directory.")
            resolved = load_saved(run)
            differing = model_differences(resolved.recipe, folder.model, current())
            if differing:
                raise UsageError(f"The recipe of {run} has another model than {folder.location}:\n  " + "\n  ".join(differing[:12]))
            for remark in folder.remarks(resolved.recipe):
                log.warning(remark)
            return resolved
        if "recipe" not in options:
            raise UsageError(
                f"{run} is no run directory. Name the recipe that it is to have: --option recipe=NAME (its model is replaced by the folder's)."
            )
        resolved = resolve(options["recipe"])
        recipe = resolved.recipe
        data = recipe.data if folder.tokenizer is None else chz.replace(recipe.data, tokenizer=folder.tokenizer)
        made = _seeing_as(folder, chz.replace(recipe, model=folder.model, data=data))
        if found := check(made, current()):
            raise UsageError(
                f"The recipe {options['recipe']} does not go with the model of {folder.location}:\n  "
                + "\n  ".join(found)
                + "\nName a recipe that does: "
                "its sizes may be changed in a file of your own (--option recipe=FILE.py:FUNCTION)."
            )
        return _resolved(made, resolved.name)


class Export:
    """The tensors of theirs that a checkpoint's weights make, each in blocks."""

    def __init__(self, weights: CheckpointWeights, dtype: str | None):
        plugins = current()
        entry = plugins.entry_of(weights.model)
        assert isinstance(entry, ModelEntry)
        table = table_of(entry)
        self.weights, self.dtype, self.table = weights, dtype, table
        self.config: dict[str, Any] = import_reference(table.config_to_theirs)(weights.model)
        with torch.device("meta"):
            built = plugins.build(weights.model)
        every, aliases = rows_of(table, built, self.config)
        self._rows = choose([row for row in every if row.ours[0] not in aliases])
        self._sizes, self._shapes = whole_numbers(self.config), weights.shapes()
        self._check(entry)
        # What accumulates, such as selection biases, keeps its dtype, and so does what the table says.
        kept = table.extra.get("keeps_dtype", ())
        self._fixed = set(persistent_buffers(built)) | {
            name for name in self._shapes if any(fnmatch.fnmatchcase(name, glob) for glob in kept)
        }
        self._stored = {name: weights.checkpoint.manifest.tensors[f"model/{name}"].dtype for name in self._shapes}
        self._homes = {name: (row, index) for row in self._rows for index, name in enumerate(row.theirs)}
        self._theirs = {name: shape for row in self._rows for name, shape in zip(row.theirs, self._shapes_of(row), strict=True)}
        stored = next(dtype for name, dtype in self._stored.items() if name not in self._fixed)
        self.config["dtype"] = self.config["torch_dtype"] = dtype or stored
        self._add_special_ids(weights.tokenizer)

    def _check(self, entry: ModelEntry) -> None:
        wanted = {name for row in self._rows for name in row.ours}
        missing, surplus = sorted(wanted - set(self._shapes)), sorted(set(self._shapes) - wanted)
        if missing or surplus:
            parts = [f"missing: {', '.join(missing[:8])}"] if missing else []
            parts += [f"the family's table has no place for: {', '.join(surplus[:8])}"] if surplus else []
            raise CheckpointError(f"{self.weights.location} does not fit {entry.full_name}: {'; '.join(parts)}.")

    def _add_special_ids(self, tokenizer: TokenizerConfig | None) -> None:
        if tokenizer is None:
            return
        built = current().build(tokenizer)
        for name in ("bos", "eos", "pad"):
            number = getattr(built, f"{name}_id")
            if number is not None and number < self.config.get("vocab_size", number + 1):
                self.config[f"{name}_token_id"] = number

    def heads(self) -> Iterator[Head]:
        """Names, shapes and dtypes of all tensors of theirs, in the table's order."""
        for row in self._rows:
            dtype = self._dtype(row)
            check_dtype(dtype)
            for name in row.theirs:
                yield Head(name, self._theirs[name], dtype)

    def _shapes_of(self, row: Row) -> list[tuple[int, ...]]:
        empty = [torch.empty(self._shapes[name], device="meta") for name in row.ours]
        return [tuple(tensor.shape) for tensor in to_theirs(row, empty, self._sizes)]

    def _dtype(self, row: Row) -> str:
        stored = self._stored[row.ours[0]]
        return stored if self.dtype is None or row.ours[0] in self._fixed else self.dtype

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A tensor of theirs as consecutive parts of its elements."""
        row, index = self._homes[name]
        dtype = self._dtype(row)
        for tensor in self._parts(row, index, self._theirs[name]):
            yield converted(tensor, dtype, name)

    def _parts(self, row: Row, index: int, shape: tuple[int, ...]) -> Iterator[Tensor]:
        # A block of a turned matrix's rows is a column of what is read, which would be read from one end to the other for each.
        is_turned = len(shape) == 2 and any(step.kind == "transpose" for step in steps_of(row.op))
        for box in [Box.whole(shape)] if is_turned or not shape else row_boxes(shape, 4):
            yield write_box(row, index, box, self.weights.read, self._sizes, self._shapes)


def converted(tensor: Tensor, dtype: str, name: str) -> Tensor:
    """In another dtype. NumericsError where a finite value would become infinite."""
    wanted = getattr(torch, dtype)
    if tensor.dtype == wanted:
        return tensor
    result = tensor.to(wanted)
    if wanted.is_floating_point and wanted.itemsize < tensor.dtype.itemsize:
        lost = int((result.float().isinf() & ~tensor.isinf()).sum())
        if lost:
            raise NumericsError(
                f"{name}: {lost} values are too large for {dtype} and would become infinite. Choose another dtype (bfloat16)."
            )
    return result


def _seeing_as(folder: HFFolder, recipe: Recipe) -> Recipe:
    """The recipe with the folder's processor, where its loader has one. Says what changes, and what could not be read."""
    mine = processor_of(recipe)
    if mine is None:
        return recipe
    found, said = folder.processor_on(mine)
    for sentence in (*said, *(f"data.loader.processor becomes that of {folder.location}: {each}." for each in differences(mine, found))):
        log.warning(sentence)
    return with_processor(recipe, found)


def _resolved(recipe: Recipe, name: str) -> Resolved:
    """A recipe that was made here, as if it had been resolved."""
    values = flatten(recipe, current())
    return Resolved(name, recipe, {path: Resolution(value, "import") for path, value in values.items()}, values)


def _run_of(checkpoint: Checkpoint) -> Path | None:
    """The run directory in which a checkpoint on this machine's file system lies."""
    place = Path(checkpoint.location).parent.parent
    return place if (place / "recipe.json").is_file() else None


def _copy_tokenizer(tokenizer: TokenizerConfig | None, folder: Path) -> list[Path]:
    """The files of a tokenizer.json tokenizer; others have none that transformers could read."""
    if not isinstance(tokenizer, TokenizerJsonConfig):
        return []
    place = Path(tokenizer.path).expanduser()
    source = place / "tokenizer.json" if place.is_dir() else place
    names = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
    found = [(source, "tokenizer.json"), *((source.with_name(name), name) for name in names)]
    copied = []
    for path, name in found:
        if path.is_file():
            shutil.copyfile(path, folder / name)
            copied.append(folder / name)
    return copied


def _write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _check_options(options: Mapping[str, str], known: tuple[str, ...]) -> None:
    for name in options:
        if name not in known:
            raise UsageError(f"The format hf has no option {name!r}. {did_you_mean(name, known)}")


def parse_size(text: str) -> int:
    """Bytes of `500MB`, `5GB`, `4GiB` or a plain number."""
    digits = text.strip().rstrip("BbGgMmKkIi")
    unit = text.strip()[len(digits) :].upper().removesuffix("B")
    found = {name.removesuffix("B"): factor for name, factor in UNITS.items()}
    try:
        count = int(float(digits) * found[unit])
    except (ValueError, KeyError):
        raise UsageError(f"A size must be a number of bytes such as 500MB, 5GB or 4GiB, got {text!r}.") from None
    if count < 1:
        raise UsageError(f"A shard must hold at least one byte, got {text!r}.")
    return count
