"""Processors of images and video in folders. What their files mean a family's table says: `extra["processor_to_ours"]` and `extra["processor_to_theirs"]`, both "module:function".

`processor_to_ours(read, model, processor) -> (processor, sentences)`, where `read(name)` gives a JSON file of the folder (None: there is none), and `processor` is what a recipe has so far, or
None; `processor_to_theirs(processor) -> (files by name, sentences)`. Sentences say what could not be had, for whoever imports or exports.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chz
from intarsia.config import Recipe
from intarsia.contracts import HFTable
from intarsia.plugins import import_reference

log = logging.getLogger("intarsia_huggingface")


def found_in(folder: Path, table: HFTable, model: Any, processor: Any, read: Any) -> tuple[Any, list[str]]:
    """The processor that a folder's files describe, on top of `processor`, and what is to be said of it. Families without processors leave it as it is."""
    reference = table.extra.get("processor_to_ours")
    if not reference:
        return processor, []
    found, said = import_reference(reference)(lambda name: read(folder / name) if (folder / name).is_file() else None, model, processor)
    return found, [f"{folder}: {sentence}." for sentence in (each.rstrip(".") for each in said)]


def differences(one: Any, other: Any) -> list[str]:
    """Where two processors of one kind differ, both sides of each."""
    if type(one) is not type(other) or not chz.is_chz(one):
        return [] if one == other else [f"the processor is {one!r}, there {other!r}"]
    pairs = ((name, getattr(one, name), getattr(other, name)) for name in chz.chz_fields(one))
    return [f"{name} is {ours!r}, there {theirs!r}" for name, ours, theirs in pairs if ours != theirs]


def processor_of(recipe: Recipe) -> Any:
    """A recipe's processor; None where its loader has none."""
    return getattr(recipe.data.loader, "processor", None)


def with_processor(recipe: Recipe, processor: Any) -> Recipe:
    """The recipe with another processor in its loader."""
    loader: Any = recipe.data.loader
    return chz.replace(recipe, data=chz.replace(recipe.data, loader=chz.replace(loader, processor=processor)))


def files_of(table: HFTable, model: Any, processor: Any) -> Mapping[str, Mapping[str, Any]]:
    """The files that say what a processor does; what they cannot say is logged. None where there is no processor, or the model does not see."""
    reference = table.extra.get("processor_to_theirs")
    if not reference or processor is None or getattr(model, "vision", None) is None:
        return {}
    files, said = import_reference(reference)(processor)
    for sentence in said:
        log.warning("%s.", sentence)
    return files
