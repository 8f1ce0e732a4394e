"""`intarsia config`: a recipe as it is resolved, and who set each value. Torch-free."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from intarsia import plugins
from intarsia.config import Resolution, Resolved, resolve, shapes
from intarsia.config.paths import folded, split
from intarsia.config.tree import DEFAULT

from intarsia_console.differences import Difference, diff

BOLD, DIM, PLAIN = "\033[1m", "\033[2m", "\033[0m"
Row = tuple[str, str, str]
Tree = dict[str, Any]


class ConfigCommand:
    """Prints the recipe, its JSON, or its differences from another; without a recipe the list of recipes."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The command's arguments."""
        parser.add_argument(
            "recipe", nargs="?", help="name of a recipe, path.py:function, run directory or recipe.json; none: list the recipes"
        )
        parser.add_argument(
            "overrides", nargs="*", default=[], metavar="PATH=VALUE", help="overrides, such as optimizer=muon or model.layers.*.dim=64"
        )
        parser.add_argument(
            "--with", dest="transforms", action="append", default=[], metavar="TRANSFORM", help="apply a transform (repeatable)"
        )
        parser.add_argument("--all", action="store_true", help="do not fold equal layers")
        parser.add_argument("--json", action="store_true", help="print what resolved.json would hold (with --diff: the differences)")
        parser.add_argument("--diff", metavar="OTHER", help="print where the recipe differs from this recipe or run directory")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print to standard output."""
        if arguments.recipe is None:
            return self._list(arguments.json)
        resolved = resolve(arguments.recipe, arguments.overrides, arguments.transforms)
        if arguments.diff is not None:
            differences = diff(resolved, resolve(arguments.diff))
            print(
                _json([_plain(difference) for difference in differences])
                if arguments.json
                else _differences(resolved, arguments.diff, differences)
            )
        else:
            print(_json(resolved.resolved_json()) if arguments.json else _resolved(resolved, arguments.all))
        return 0

    def _list(self, as_json: bool) -> int:
        entries = {kind: plugins.current().registry(kind) for kind in ("recipe", "transform")}
        rows = {kind: dict(zip(registry.names(), registry.entries(), strict=False)) for kind, registry in entries.items()}
        if as_json:
            print(
                _json(
                    {
                        f"{kind}s": [{"name": name, "owner": e.owner, "doc": e.doc} for name, e in found.items()]
                        for kind, found in rows.items()
                    }
                )
            )
            return 0
        width = max((len(name) for found in rows.values() for name in found), default=0)
        for kind, found in rows.items():
            print(f"{kind.capitalize()}s:" if found else f"No {kind} is installed.")
            for name, entry in found.items():
                print(f"  {name:<{width}}  {entry.doc} [{entry.owner}]")
        return 0


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


def _plain(difference: Difference) -> dict[str, Any]:
    sides = {"left": difference.left, "right": difference.right}
    return {"path": difference.path} | {
        side: {"value": shapes.encode(entry.value), "source": entry.source} if entry else None for side, entry in sides.items()
    }


# ---------------------------------------------------------------- the tree


def _resolved(resolved: Resolved, unfolded: bool) -> str:
    tree: Tree = {}
    for path, entry in resolved.values.items():
        branch = tree
        for segment in split(path):
            branch = branch.setdefault(segment, {})
        branch[""] = entry
    lines = _table(list(_rows(tree, "", unfolded)))
    lost = [entry for entry in resolved.dropped if entry.source != DEFAULT]
    if lost:
        lines += ["", "Dropped, since what stood above was replaced:"]
        lines += _table([(f"  {entry.path}", shapes.show(entry.value), f"{entry.source}; by {entry.by}") for entry in lost])
    return "\n".join(lines)


def _rows(tree: Tree, indent: str, unfolded: bool) -> Iterator[Row]:
    keys = [key for key in tree if key]
    while keys:
        first, branch = keys[0], tree[keys[0]]
        equal = [first]
        if first.isdecimal() and not unfolded:
            while len(equal) < len(keys) and tree[keys[len(equal)]] == branch:
                equal.append(keys[len(equal)])
        entry: Resolution | None = branch.get("")
        name = first if len(equal) == 1 else f"{first}-{equal[-1]}"
        yield f"{indent}{name}", shapes.show(entry.value) if entry else "", entry.source if entry else ""
        yield from _rows(branch, indent + "  ", unfolded)
        keys = keys[len(equal) :]


def _table(rows: list[Row]) -> list[str]:
    """Aligned columns; on a terminal what was changed after the recipe stands out and defaults step back."""
    widths = [min(max((len(row[column]) for row in rows), default=0), limit) for column, limit in ((0, 60), (1, 48))]
    lines = []
    for name, value, source in rows:
        line = f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}".rstrip()
        changed = re.match(r"command line|transform |override by ", source)
        lines.append(
            f"{BOLD}{line}{PLAIN}" if changed and _colours() else f"{DIM}{line}{PLAIN}" if source == DEFAULT and _colours() else line
        )
    return lines


def _colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _differences(resolved: Resolved, other: str, differences: list[Difference]) -> str:
    if not differences:
        return f"{resolved.name} and {other} are equal."
    groups: dict[tuple[str, Row, Row], list[str]] = {}
    lone = {difference.path for difference in differences if difference.left is None or difference.right is None}
    for difference in differences:
        if difference.path in lone and lone.intersection(_above(difference.path)):
            continue  # It is not there because what holds it is not.
        left, right = (
            ("", shapes.show(side.value), side.source) if side else ("", "-", "not there") for side in (difference.left, difference.right)
        )
        groups.setdefault((folded(difference.path), left, right), []).append(difference.path)
    lines = [f"- {resolved.name}", f"+ {other}"]
    for (pattern, left, right), paths in groups.items():
        lines.append(paths[0] if len(paths) == 1 else f"{_span(pattern, paths)} ({len(paths)} places)")
        lines += [f"  {sign} {line.strip()}" for sign, line in zip("-+", _table([left, right]), strict=True)]
    return "\n".join(lines)


def _above(path: str) -> Iterator[str]:
    """The paths of what holds this one, the nearest last."""
    return itertools.accumulate(split(path)[:-1], lambda above, segment: f"{above}.{segment}")


def _span(pattern: str, paths: list[str]) -> str:
    """The pattern with its index as a range (`layers.16-31`), where the paths differ in one index and leave none out."""
    before, _, after = pattern.partition("*")
    found = [int(path.removeprefix(before).removesuffix(after)) for path in paths] if "*" not in after else []
    whole = found and found == list(range(found[0], found[0] + len(found)))
    return f"{before}{found[0]}-{found[-1]}{after}" if whole else pattern


command = ConfigCommand()
