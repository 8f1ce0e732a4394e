"""A family's HFTable applied to tensors, row by row, both ways. Pure: names and tensors in, names and tensors out.

`expand` gives the rows of one model, `choose` those that hold where names of ours have alternatives; `to_ours` and `to_theirs` convert the tensors of one row, which is all that a
streaming reader or writer holds at a time (`boxes` do less than that); `apply_rules` does a whole model in memory. What happens to tensors is in `ops`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from intarsia.contracts import HFRule, HFTable
from intarsia.errors import CheckpointError, PluginError, did_you_mean
from torch import Tensor

from intarsia_huggingface.ops import LAYER, Chain, Shape, check, steps_of


def whole_numbers(config: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """The whole numbers of a config.json, which rules name; those of a config within it by dotted names (`vision_config.depth`)."""
    found: dict[str, int] = {}
    for key, value in config.items():
        if type(value) is int:
            found[prefix + key] = value
        elif isinstance(value, Mapping):
            found |= whole_numbers(value, f"{prefix}{key}.")
    return found


def experts_of(table: HFTable, sizes: Mapping[str, int]) -> int:
    """How many experts a config counts, by the first field of the table's `extra["experts_field"]` (joined by `|`) that it has; 0 where it has none."""
    fields = table.extra.get("experts_field", "").split("|")
    return next((sizes[field] for field in fields if field in sizes), 0)


@dataclasses.dataclass(frozen=True)
class Row:
    """A rule for one layer: the names on both sides, and what happens between them."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    op: str
    heads: str


def chain_of(row: Row, sizes: Mapping[str, int] | None = None) -> Chain:
    """The row's ops with the config's whole numbers."""
    return Chain(row.op, f"{row.theirs[0]} -> {', '.join(row.ours)}", row.heads, sizes or {})


def expand(
    table: HFTable,
    layers: int,
    experts: int = 0,
    aliases: Mapping[str, str] | None = None,
    *,
    names: Collection[str] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> list[Row]:
    """The rows of a model with so many layers (and experts). PluginError where a rule is not well formed.

    Arguments: a rule for a name in `aliases` (tied name to canonical name) has no row: the canonical one carries the tensor. `names` are the model's own; rules
    for others have no row, so that one table serves models whose layers differ (None: every rule holds for every layer). `sizes` are the config's whole numbers.
    Where several rows are for one name of ours they are alternatives: see `choose`.
    """
    rows = []
    for rule in table.rules:
        check(rule)
        found = LAYER.search(rule.theirs)
        first = _size(rule, found[1], sizes) if found and found[1] else 0
        needed = [name for glob, name in table.extra.get("where", {}).items() if fnmatch.fnmatchcase(rule.theirs, glob)]
        count = (sizes or {}).get(rule.heads, 0) if rule.op == "copy" else layers
        for i in range(count) if found else (0,):
            ours = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
            ours = tuple(name.replace("{i}", str(i)) for name in ours)
            if rule.op == "copy":
                ours = tuple((aliases or {}).get(name, name) for name in ours)
            theirs = LAYER.sub(str(first + i), rule.theirs)
            if (aliases and ours[0] in aliases) or not (names is None or any(name in names for name in ours)):
                continue
            if names is not None and not all(_holds(name.replace("{i}", str(i)), names) for name in needed):
                continue
            stacked = any(step.kind == "stack" for step in steps_of(rule.op))
            if stacked and not experts:
                raise PluginError(
                    f"The Hugging Face rule {rule.theirs!r} stacks experts; the table's extra['experts_field'] must name a field of the config that counts them."
                )
            several = tuple(theirs.replace("{e}", str(e)) for e in range(experts)) if stacked else (theirs,)
            rows.append(Row(several, ours, rule.op, rule.heads))
    return rows


def _holds(condition: str, names: Collection[str]) -> bool:
    """Whether a model has the name of a condition of `extra["where"]`; with a `!` before it: has it not."""
    return (condition.removeprefix("!") in names) != condition.startswith("!")


def _size(rule: HFRule, field: str, sizes: Mapping[str, int] | None) -> int:
    if not sizes or field not in sizes:
        raise PluginError(
            f"The Hugging Face rule {rule.theirs!r} needs the config's {field!r}, a whole number. {did_you_mean(field, sizes or ())}"
        )
    return sizes[field]


def choose(rows: Sequence[Row], present: Collection[str] | None = None) -> list[Row]:
    """Of rows that are alternatives, having names of ours in common, the one that holds: on export (None) the first; on import the first all of whose names of theirs are
    `present`, else the first of which some are, else the first. Copies are left as they are."""
    chosen: dict[int, Row] = {number: row for number, row in enumerate(rows) if row.op == "copy"}
    taken: set[str] = set()
    rules: list[Any] = [lambda row: True]
    if present is not None:
        rules = [lambda row: all(name in present for name in row.theirs), lambda row: any(name in present for name in row.theirs), *rules]
    for holds in rules:
        for number, row in enumerate(rows):
            if number not in chosen and taken.isdisjoint(row.ours) and holds(row):
                chosen[number] = row
                taken.update(row.ours)
    return [chosen[number] for number in sorted(chosen)]


def formed(
    rows: Sequence[Row], stored: Mapping[str, Shape], shapes: Mapping[str, Shape], sizes: Mapping[str, int] | None = None
) -> list[Row]:
    """Of rows that read the same tensors of theirs in several forms (as they are, or transposed), those of one form: the first that fits the shapes in which all of them are `stored`, else
    the first. All at once, since a square matrix fits either. `shapes` are our names'."""
    forms: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.op != "copy":
            forms.setdefault(row.theirs, []).append(row)
    several = [each for each in forms.values() if len(each) > 1 and all(name in stored for name in each[0].theirs)]

    def fits(row: Row) -> bool:
        empty = [torch.empty(shapes[name], device="meta") for name in row.ours]
        wanted = to_theirs(row, empty, sizes)
        return all(tuple(tensor.shape) == tuple(stored[name]) for name, tensor in zip(row.theirs, wanted, strict=True))

    count = max((len(each) for each in several), default=1)
    form = next((k for k in range(count) if all(fits(each[min(k, len(each) - 1)]) for each in several)), 0)
    left = {id(row) for each in several for row in each} - {id(each[min(form, len(each) - 1)]) for each in several}
    return [row for row in rows if id(row) not in left]


def to_ours(
    row: Row, tensors: Sequence[Tensor], sizes: Mapping[str, int] | None = None, shapes: Mapping[str, Shape] | None = None
) -> list[Tensor]:
    """Our tensors from theirs (in the order of the row's names); views where possible.

    Arguments: `sizes` are the config's whole numbers, of which rules name head counts; `shapes` those of our names, for splits into unequal parts.
    """
    known = [tuple(shapes[name]) for name in row.ours] if shapes and all(name in shapes for name in row.ours) else None
    return chain_of(row, sizes).forward(tensors, known)


def to_theirs(row: Row, tensors: Sequence[Tensor], sizes: Mapping[str, int] | None = None) -> list[Tensor]:
    """Their tensors from ours: the inverse of `to_ours`."""
    return chain_of(row, sizes).backward(tensors, len(row.theirs))


def apply_rules(
    table: HFTable,
    tensors: Mapping[str, Tensor],
    layers: int,
    direction: Literal["import", "export"],
    *,
    sizes: Mapping[str, int] | None = None,
    experts: int = 0,
    aliases: Mapping[str, str] | None = None,
    shapes: Mapping[str, Shape] | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """All tensors of a model, converted. Strict in both directions: CheckpointError lists what is missing and what nothing uses.

    Arguments: `aliases` maps our tied names to their canonical ones: they have no tensor of their own on either side; where a file has one
    nevertheless, it must equal the canonical one, as a `copy` must. `sizes`, `experts`, `shapes`, `names` as in `to_ours` and `expand`.
    """
    importing = direction == "import"
    every = expand(table, layers, experts, names=names, sizes=sizes)
    rows = expand(table, layers, experts, aliases, names=names, sizes=sizes)
    if importing and shapes:
        stored = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        every, rows = (formed(each, stored, shapes, sizes) for each in (every, rows))
    every, rows = (choose(each, tensors if importing else None) for each in (every, rows))
    if importing:
        rows = [row for row in rows if row.op != "copy"]
    missing = [name for row in rows for name in (row.theirs if importing else row.ours) if name not in tensors]
    used = {name for row in every for name in (row.theirs if importing else row.ours)}
    unused = [name for name in tensors if name not in used and not any(fnmatch.fnmatchcase(name, glob) for glob in table.ignored)]
    if missing or unused:
        raise CheckpointError(_mismatch(direction, missing, unused))
    if importing:
        _check_ties(every, tensors, aliases or {})
    out: dict[str, Tensor] = {}
    for row in rows:
        if importing:
            out.update(zip(row.ours, to_ours(row, [tensors[name] for name in row.theirs], sizes, shapes), strict=True))
        else:
            out.update(zip(row.theirs, to_theirs(row, [tensors[name] for name in row.ours], sizes), strict=True))
    return out


def _mismatch(direction: str, missing: Sequence[str], unused: Sequence[str]) -> str:
    def listed(names: Sequence[str]) -> str:
        return ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    parts = [f"missing: {listed(missing)}"] if missing else []
    parts += [f"nothing uses: {listed(unused)}"] if unused else []
    return f"The tensors do not fit the family's Hugging Face table ({direction}): {'; '.join(parts)}."


def twins(rows: Sequence[Row], aliases: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """What must be equal where a file has both: (a tied or copied tensor of theirs, the canonical one of theirs, why). `rows` include tied names."""
    homes = {name: row.theirs[0] for row in rows if row.op != "copy" for name in row.ours}
    found = [(homes[alias], homes[canonical], "tied") for alias, canonical in aliases.items() if alias in homes]
    copies = [(row.theirs[0], homes[aliases.get(row.ours[0], row.ours[0])], "copied") for row in rows if row.op == "copy"]
    return [*found, *copies]


def _check_ties(rows: Sequence[Row], tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    for copy, original, why in twins(rows, aliases):
        one, other = tensors.get(copy), tensors.get(original)
        if one is not None and other is not None and not torch.equal(one, other):
            reason = "the model's config ties them: tie_word_embeddings is wrong" if why == "tied" else "the former is a copy of the latter"
            raise CheckpointError(f"{copy} and {original} differ, but {reason}, or the file is.")
