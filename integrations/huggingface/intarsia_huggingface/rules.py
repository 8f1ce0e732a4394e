"""A family's HFTable applied to tensors, row by row, both ways. Pure: names and tensors in, names and tensors out.

`expand` gives the rows of one model; `to_ours` and `to_theirs` convert the tensors of one row, which is all that a streaming reader or writer holds at a time;
`apply_rules` does a whole model in memory.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import torch
from intarsia.contracts import HFRule, HFTable
from intarsia.errors import CheckpointError, PluginError, did_you_mean
from torch import Tensor

OPS = ("same", "transpose", "rope_half_to_pairs", "split:K", "stack", "copy")

LAYER = re.compile(r"\{i(?:\+(\w+))?\}")
"""A layer's number in a name of theirs: `{i}`, or `{i+FIELD}`, which counts from what the config's FIELD says."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A rule for one layer: the names on both sides, and what happens between them."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    op: str
    heads: str


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
    """
    rows = []
    for rule in table.rules:
        _check(rule)
        found = LAYER.search(rule.theirs)
        first = _size(rule, found[1], sizes) if found and found[1] else 0
        count = (sizes or {}).get(rule.heads, 0) if rule.op == "copy" else layers
        for i in range(count) if found else (0,):
            ours = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
            ours = tuple(name.replace("{i}", str(i)) for name in ours)
            if rule.op == "copy":
                ours = tuple((aliases or {}).get(name, name) for name in ours)
            theirs = LAYER.sub(str(first + i), rule.theirs)
            several = tuple(theirs.replace("{e}", str(e)) for e in range(experts)) if rule.op == "stack" else (theirs,)
            if not (aliases and ours[0] in aliases) and (names is None or any(name in names for name in ours)):
                rows.append(Row(several, ours, rule.op, rule.heads))
    return rows


def _check(rule: HFRule) -> None:
    ours = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
    known = rule.op in ("same", "transpose", "rope_half_to_pairs", "stack", "copy") or rule.op.partition(":")[0] == "split"
    wrong = None
    if not known:
        wrong = f"its op {rule.op!r} is none of {', '.join(OPS)}"
    elif rule.op != "copy" and any(("{i}" in name) != bool(LAYER.search(rule.theirs)) for name in ours):
        wrong = "only one side has {i}"
    elif ("{e}" in rule.theirs) != (rule.op == "stack"):
        wrong = "{e} goes with op stack, and stack with {e}"
    elif (len(ours) > 1) != rule.op.startswith("split:") or (len(ours) > 1 and rule.op != f"split:{len(ours)}"):
        wrong = f"it has {len(ours)} names of ours and op {rule.op!r}"
    elif (rule.op in ("rope_half_to_pairs", "copy")) != bool(rule.heads):
        wrong = "`heads` goes with the ops rope_half_to_pairs and copy"
    if wrong:
        raise PluginError(f"The Hugging Face rule {rule.theirs!r} -> {rule.ours!r} is not well formed: {wrong}.")


def _size(rule: HFRule, field: str, sizes: Mapping[str, int] | None) -> int:
    if not sizes or field not in sizes:
        raise PluginError(
            f"The Hugging Face rule {rule.theirs!r} needs the config's {field!r}, a whole number. {did_you_mean(field, sizes or ())}"
        )
    return sizes[field]


def to_ours(
    row: Row, tensors: Sequence[Tensor], sizes: Mapping[str, int] | None = None, rows_of: Mapping[str, int] | None = None
) -> list[Tensor]:
    """Our tensors from theirs (in the order of the row's names); views where possible.

    Arguments: `sizes` gives head counts by the name in the rule; `rows_of` the size of dim 0 of our names, for `split` into unequal parts.
    """
    first = tensors[0]
    if row.op == "transpose":
        return [first.transpose(0, 1)]
    if row.op == "stack":
        return [torch.stack(list(tensors))]
    if row.op == "rope_half_to_pairs":
        return [first.unflatten(0, (_heads(row, sizes), 2, -1)).transpose(1, 2).flatten(0, 2)]
    if row.op.startswith("split:"):
        parts = [rows_of[name] for name in row.ours] if rows_of else [first.shape[0] // len(row.ours)] * len(row.ours)
        if sum(parts) != first.shape[0]:
            raise CheckpointError(
                f"{row.theirs[0]} has {first.shape[0]} rows, which do not split into {' + '.join(map(str, parts))} for {', '.join(row.ours)}."
            )
        return list(first.split(parts))
    return [first]


def to_theirs(row: Row, tensors: Sequence[Tensor], sizes: Mapping[str, int] | None = None) -> list[Tensor]:
    """Their tensors from ours: the inverse of `to_ours`."""
    first = tensors[0]
    if row.op == "transpose":
        return [first.transpose(0, 1)]
    if row.op == "stack":
        return list(first.unbind(0))
    if row.op == "rope_half_to_pairs":
        return [first.unflatten(0, (_heads(row, sizes), -1, 2)).transpose(1, 2).flatten(0, 2)]
    if row.op.startswith("split:"):
        return [torch.cat(list(tensors))]
    return [first]


def _heads(row: Row, sizes: Mapping[str, int] | None) -> int:
    if not sizes or row.heads not in sizes:
        raise PluginError(
            f"The Hugging Face rule for {row.ours[0]} needs the number of heads {row.heads!r}. {did_you_mean(row.heads, sizes or ())}"
        )
    return sizes[row.heads]


def apply_rules(
    table: HFTable,
    tensors: Mapping[str, Tensor],
    layers: int,
    direction: Literal["import", "export"],
    *,
    sizes: Mapping[str, int] | None = None,
    experts: int = 0,
    aliases: Mapping[str, str] | None = None,
    rows_of: Mapping[str, int] | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """All tensors of a model, converted. Strict in both directions: CheckpointError lists what is missing and what nothing uses.

    Arguments: `aliases` maps our tied names to their canonical ones: they have no tensor of their own on either side; where a file has one
    nevertheless, it must equal the canonical one, as a `copy` must. `sizes`, `experts`, `rows_of`, `names` as in `to_ours` and `expand`.
    """
    importing = direction == "import"
    every = expand(table, layers, experts, names=names, sizes=sizes)
    rows = expand(table, layers, experts, aliases, names=names, sizes=sizes)
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
            out.update(zip(row.ours, to_ours(row, [tensors[name] for name in row.theirs], sizes, rows_of), strict=True))
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
