"""A Hugging Face model folder as weights by our names: which family it is, its config as ours, and any box of any parameter."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from intarsia.config import Recipe
from intarsia.contracts import Box, HFTable, ModelEntry
from intarsia.errors import CheckpointError, IntarsiaError, UsageError, did_you_mean, nearest
from intarsia.parameters import persistent_buffers
from intarsia.plugins import Plugins, import_reference
from torch import Tensor, nn

from intarsia_huggingface.boxes import read_box
from intarsia_huggingface.config import TokenizerJsonConfig
from intarsia_huggingface.processors import differences, found_in, log, processor_of
from intarsia_huggingface.quantised import SUFFIX, Blocks, blocks_of, numbers_of
from intarsia_huggingface.rules import Row, choose, expand, experts_of, formed, to_theirs, twins, whole_numbers
from intarsia_huggingface.safetensors_file import BLOCK_BYTES, SafetensorsFile

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
FLOATING = ("float32", "float64", "float16", "bfloat16")
SHOWN = 8
"""How many names of a kind a message lists."""


def family_of(architecture: str, plugins: Plugins) -> ModelEntry:
    """The model family that reads this value of `architectures`. UsageError with the nearest where there is none."""
    entries = [entry for entry in plugins.registry("model").entries() if isinstance(entry, ModelEntry) and entry.hf]
    found = [entry for entry in entries if architecture in entry.architectures]
    known = [name for entry in entries for name in entry.architectures]
    if not found:
        raise UsageError(f"No installed model family reads the architecture {architecture!r}. {did_you_mean(architecture, known)}")
    if len(found) > 1:
        names = " and ".join(entry.full_name for entry in found)
        raise UsageError(f"Several model families read the architecture {architecture!r}: {names}. Disable all but one (plugins.disable).")
    return found[0]


def table_of(entry: ModelEntry) -> HFTable:
    """The family's Hugging Face table."""
    if not entry.hf:
        raise UsageError(f"The model family {entry.full_name} has no Hugging Face table, so its weights cannot be exchanged.")
    table = import_reference(entry.hf)
    assert isinstance(table, HFTable)
    return table


def rows_of(table: HFTable, model: nn.Module, config: Mapping[str, Any]) -> tuple[list[Row], dict[str, str]]:
    """The table's rows for this model, tied names and alternatives included, and the ties: alias to canonical name."""
    regions = model.regions()  # type: ignore[operator]
    sizes = whole_numbers(config)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)} | set(persistent_buffers(model))
    rows = expand(table, len(regions.blocks), experts_of(table, sizes), names=names, sizes=sizes)
    return rows, {alias: canonical for canonical, *others in regions.ties for alias in others}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the folder. CheckpointError where it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return content


class HFFolder:
    """See `intarsia.contracts.WeightReader`. On opening everything but the weights themselves is checked: names both ways, shapes, dtypes, ties."""

    def __init__(self, folder: Path, plugins: Plugins):
        self.location, self.folder = str(folder), folder
        self.config = read_json(folder / CONFIG)
        architectures = self.config.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise UsageError(f"{folder / CONFIG} names no `architectures`, so there is no telling which model family it is.")
        self.entry = family_of(str(architectures[0]), plugins)
        self.table = table_of(self.entry)
        self.model = self._our_config()
        with torch.device("meta"):
            built = plugins.build(self.model)
        self._files = dict(self._find_tensors())
        rows, self._aliases = rows_of(self.table, built, self.config)
        kept = persistent_buffers(built)
        self.buffers = {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in kept.items()}
        every_shape = {
            name: tuple(tensor.shape) for name, tensor in {**dict(built.named_parameters(remove_duplicate=False)), **kept}.items()
        }
        self._shapes = {name: shape for name, shape in every_shape.items() if name not in self._aliases}
        self._sizes = whole_numbers(self.config)
        stored = {name: file.tensors[name].shape for name, file in self._files.items()}
        every = choose(formed(rows, stored, every_shape, self._sizes), self._files)
        self._rows = [row for row in every if row.op != "copy" and row.ours[0] not in self._aliases]
        self._twins = twins(every, self._aliases)
        self._blocks: Blocks = blocks_of(self.config, str(folder / CONFIG))
        self._homes = {name: (row, index) for row in self._rows for index, name in enumerate(row.ours)}
        self._check_names()
        self._check_tensors()
        self._check_ties()
        self.tokenizer = TokenizerJsonConfig(path=str(folder)) if (folder / "tokenizer.json").is_file() else None
        self.stop_ids = self._stop_ids()

    def _our_config(self) -> Any:
        try:
            return import_reference(self.table.config_to_ours)(self.config)
        except KeyError as error:
            raise UsageError(f"{self.folder / CONFIG} lacks {error}, which {self.entry.full_name} needs.") from error
        except IntarsiaError as error:
            raise UsageError(f"{self.folder / CONFIG} is not one that {self.entry.full_name} can read: {error}") from error
        except Exception as error:
            raise UsageError(
                f"{self.folder / CONFIG} is not one that {self.entry.full_name} can read: {type(error).__name__}: {error}"
            ) from error

    # ------------------------------------------------------------ files

    def _find_tensors(self) -> Iterator[tuple[str, SafetensorsFile]]:
        """Each tensor's name with its file. CheckpointError where the index and the files disagree."""
        index = self.folder / INDEX
        if not index.exists():
            files = [self.folder / SINGLE] if (self.folder / SINGLE).exists() else sorted(self.folder.glob("*.safetensors"))
            if not files:
                raise CheckpointError(self._no_weights())
            homes: dict[str, SafetensorsFile] = {}
            for file in map(SafetensorsFile, files):
                for name in file.tensors:
                    if name in homes:
                        raise CheckpointError(f"{file.path}: the tensor {name!r} is in {homes[name].path.name} as well.")
                    homes[name] = file
            yield from homes.items()
            return
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) and Path(file).name == file for file in places.values()):
            raise CheckpointError(f"{index}: weight_map must be an object from tensors' names to files in the same folder.")
        absent = sorted({file for file in places.values() if not (self.folder / file).exists()})
        if absent:
            raise CheckpointError(f"{index} names files that are not there: {', '.join(absent[:SHOWN])}. Fetch them again.")
        files_by_name = {file: SafetensorsFile(self.folder / file) for file in sorted(set(places.values()))}
        lost = [f"{name!r} in {file}" for name, file in places.items() if name not in files_by_name[file].tensors]
        surplus = [f"{name!r} in {file}" for file, opened in files_by_name.items() for name in opened.tensors if places.get(name) != file]
        if lost or surplus:
            parts = [f"listed and not there: {_listed(lost)}"] if lost else []
            parts += [f"there and not listed: {_listed(surplus)}"] if surplus else []
            raise CheckpointError(f"{index} does not fit the files beside it: {'; '.join(parts)}.")
        yield from ((name, files_by_name[file]) for name, file in places.items())

    def _no_weights(self) -> str:
        pickled = sorted(path.name for glob in ("*.bin", "*.pt", "*.pth") for path in self.folder.glob(glob))
        hint = f" {pickled[0]} is a pickle, which can run code and is never read: convert it to safetensors." if pickled else ""
        return f"{self.folder} has no safetensors file ({SINGLE}, or shards with {INDEX}).{hint}"

    # ------------------------------------------------------------ checks

    def _check_names(self) -> None:
        """Every name of theirs is used or ignored, every name of ours is filled. All that is wrong is in one message."""
        tied = {copy for copy, _, _ in self._twins}
        wanted = {name for row in self._rows for name in row.theirs}
        scales, unscaled = self._scales(wanted | tied)
        ignored = self.table.ignored
        missing = sorted((wanted - set(self._files)) | unscaled)
        known = wanted | tied | scales
        surplus = [name for name in self._files if name not in known and not any(fnmatch.fnmatchcase(name, glob) for glob in ignored)]
        unfilled = sorted(set(self._shapes) - set(self._homes))
        if not (missing or surplus or unfilled):
            return
        lines = [f"missing: {_listed(missing)}"] if missing else []
        shown = [f"{name}{_near(name, missing or sorted(wanted))}" for name in sorted(surplus)]
        lines += [f"used by nothing: {_listed(shown)}"] if surplus else []
        lines += [f"parameters of ours that the family's table does not fill: {_listed(unfilled)}"] if unfilled else []
        heads = {row.theirs[0] for row in self._rows if row.ours[0].startswith("head.")} & set(missing)
        hint = (
            f"\nconfig.json says that the output projection is not tied to the embedding, so {heads.pop()} must be there." if heads else ""
        )
        if unscaled:
            hint += f"\n{self._blocks.lacking(sorted(name.removesuffix(SUFFIX) for name in unscaled))}"
        if not self._blocks.rows and any(name.endswith(SUFFIX) for name in surplus):
            hint += f"\n{CONFIG} has no quantization_config, so nothing says how the weights beside {SUFFIX} are quantised. Take the {CONFIG} that belongs to these files."
        hint += "".join(
            f"\n{text}" for glob, text in self.table.extra.get("hints", {}).items() if fnmatch.filter(self._unread(missing), glob)
        )
        raise CheckpointError(f"{self.folder} does not fit {self.entry.full_name}:\n  " + "\n  ".join(lines) + hint)

    def _unread(self, missing: Sequence[str]) -> list[str]:
        """Our names of which tensors of theirs are missing."""
        lost = set(missing)
        return [row.ours[0] for row in self._rows if lost.intersection(row.theirs)]

    def _scales(self, wanted: set[str]) -> tuple[set[str], set[str]]:
        """The scales that go with quantised tensors, and those of them that are not there."""
        quantised = [name for name in wanted if name in self._files and self._blocks.holds(self._files[name].tensors[name])]
        scales = {self._blocks.scale_name(name) for name in quantised}
        return scales, scales - set(self._files)

    def _check_tensors(self) -> None:
        """Shapes follow from the config, and weights are floating-point numbers."""
        problems = []
        for row in self._rows:
            empty = [torch.empty(self._shapes[name], device="meta") for name in row.ours]
            for name, wanted in zip(row.theirs, to_theirs(row, empty, self._sizes), strict=True):
                place = self._files[name].tensors[name]
                if place.shape != tuple(wanted.shape):
                    problems.append(f"{name} has shape {list(place.shape)}; by config.json {row.ours[0]} needs {list(wanted.shape)}")
                elif self._blocks.holds(place):
                    scale = self._blocks.scale_name(name)
                    problems += self._blocks.problems(name, place, self._files[scale].tensors[scale])
                elif place.dtype not in FLOATING:
                    problems.append(f"{name} is stored in {place.dtype}; weights must be in {', '.join(FLOATING)}")
        if problems:
            raise CheckpointError(f"{self.folder} does not fit its {CONFIG}:\n  " + "\n  ".join(problems[:SHOWN]) + _more(problems))

    def _check_ties(self) -> None:
        """Where their files hold a tied tensor nevertheless, or a further copy of one, it must equal the canonical one: else the config or the file is wrong."""
        for copy, original, why in self._twins:
            if copy not in self._files:
                continue
            places = [self._files[name].tensors[name] for name in (copy, original)]
            equal = places[0].shape == places[1].shape
            if equal and places[0].shape:
                for box in row_boxes(places[0].shape, 4):
                    equal = equal and torch.equal(*(self._read(name, box).float() for name in (copy, original)))
            if not equal and why == "tied":
                raise CheckpointError(
                    f"{self.folder}: {copy} and {original} differ, but {CONFIG} ties them (tie_word_embeddings is true). Either is wrong: set "
                    f"tie_word_embeddings to false if the two are meant to differ."
                )
            if not equal:
                raise CheckpointError(f"{self.folder}: {copy} and {original} differ, but {self.entry.full_name} has one tensor for both.")

    def _stop_ids(self) -> tuple[int, ...]:
        """Ids that end a text, as generation_config.json says, else config.json."""
        for file in ("generation_config.json", CONFIG):
            if (self.folder / file).is_file():
                ids = read_json(self.folder / file).get("eos_token_id")
                if ids is not None:
                    return tuple(number for number in (ids if isinstance(ids, list) else [ids]) if isinstance(number, int))
        return ()

    # ------------------------------------------------------------ processors of media

    @property
    def processor(self) -> Any:
        """What turns images and video into patches, as the folder's files say it; None where they do not, of which the reason is logged."""
        found, said = self.processor_on(None)
        for sentence in said:
            log.warning(sentence)
        return found

    def processor_on(self, processor: Any) -> tuple[Any, list[str]]:
        """A recipe's processor with what the folder's files say, and what is to be said of that."""
        return found_in(self.folder, self.table, self.model, processor, read_json)

    def remarks(self, recipe: Recipe) -> list[str]:
        """Where a recipe's processor does something else than the folder's files say."""
        mine = processor_of(recipe)
        if mine is None:
            return []
        found, said = self.processor_on(mine)
        return [*said, *(f"data.loader.processor is not that of {self.location}: {each}." for each in differences(mine, found))]

    # ------------------------------------------------------------ the contract

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of all parameters by canonical name."""
        return self._shapes

    def dtype(self, name: str) -> str:
        """The dtype in which a parameter is read: the stored one, float32 where it is stored in float8 with scales."""
        theirs = self._homes[name][0].theirs[0]
        place = self._files[theirs].tensors[theirs]
        return "float32" if self._blocks.holds(place) else place.dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """`box` of a parameter (all of it when None). Only the bytes that it needs are read."""
        if name not in self._homes:
            raise UsageError(f"{self.location} has no parameter {name!r}. {did_you_mean(name, self._homes)}")
        row, index = self._homes[name]
        box = Box.whole(self._shapes[name]) if box is None else box
        return read_box(row, index, box, self._read, self._sizes, self._shapes).contiguous()

    def _read(self, theirs: str, part: Box) -> Tensor:
        """A box of a tensor of theirs, dequantised where it is stored so."""
        file = self._files[theirs]
        if not self._blocks.holds(file.tensors[theirs]):
            return file.read(theirs, part)
        scale = self._blocks.scale_name(theirs)
        scales = numbers_of(self._files[scale].read(scale, self._blocks.scale_box(part)))
        if not bool((scales.isfinite() & (scales >= 0)).all()):
            raise CheckpointError(
                f"{self.location}: {scale} has scales that are negative or not finite, of which no weights can be made. Fetch the file again."
            )
        return self._blocks.dequantised(part, file.read(theirs, part), scales)


def row_boxes(shape: Sequence[int], item_bytes: int) -> Iterator[Box]:
    """Boxes of whole rows, of about `BLOCK_BYTES` each, that make up a tensor of at least one dimension, in order."""
    row = max(1, item_bytes * Box.whole(shape[1:]).numel)
    step = max(1, BLOCK_BYTES // row)
    for first in range(0, shape[0], step):
        yield Box((first, *(0,) * (len(shape) - 1)), (min(step, shape[0] - first), *shape[1:]))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + _more(names)


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""


def _near(name: str, known: Sequence[str]) -> str:
    close = nearest(name, known, 1)
    return f" (nearest: {close[0]})" if close else ""
