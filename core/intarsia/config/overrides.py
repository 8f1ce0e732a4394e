"""Overrides from the command line: `optimizer=muon`, `optimizer.lr=0.02`, `...window=128`, `data.mixture.1.source=text`.

Choices of entries come first, from the root downwards, then values: the order on the command line does not matter. A path without
wildcards beats a glob; of two globs that meet, the later one wins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from chz.util import MISSING

from intarsia.config import shapes
from intarsia.config.paths import SPREAD, Matcher, folded, join, matcher, matches, split, unquote
from intarsia.config.recipe import Recipe
from intarsia.config.shapes import Leaf, Many, Node, Table
from intarsia.config.tree import ROOT, Branch, Schema, Slot, together
from intarsia.errors import IntarsiaError, UsageError, did_you_mean, nearest

COMMAND_LINE = "command line"


@dataclasses.dataclass(frozen=True)
class Dropped:
    """A value that vanished because the entry above it was replaced."""

    path: str
    value: Any
    source: str
    by: str


@dataclasses.dataclass(frozen=True)
class Override:
    """One `path=value` as given."""

    text: str
    written: tuple[str, ...]
    pattern: tuple[Matcher, ...]
    value: str

    @property
    def source(self) -> str:
        """Who set it, for provenance: a glob is named, since its text is not the path."""
        return COMMAND_LINE if self.exact else f"{COMMAND_LINE} ({_partition(self.text)[0]})"

    @property
    def exact(self) -> bool:
        """Whether it names one path."""
        return all(isinstance(accepted, str) for accepted in self.pattern)


def read(texts: Sequence[str]) -> list[Override]:
    """The overrides of a command line. A path given twice with different values is an error, as is a text that is no `path=value`."""
    overrides: dict[tuple[str, ...], Override] = {}
    problems = []
    for text in texts:
        path, equals, value = _partition(text)
        if not equals or not path:
            problems.append(f"{text!r} is not PATH=VALUE (for example `optimizer.lr=0.01`); a transform is chosen by `--with NAME`")
            continue
        try:
            written = tuple(split(path.strip()))
        except ValueError as error:
            problems.append(f"{text!r}: {error}")
            continue
        new = Override(text, written, tuple(matcher(segment) for segment in written), value)
        old = overrides.setdefault(written, new)
        if old.value != value:
            problems.append(f"{old.text!r} and {text!r} set the same path to different values; give it once")
    if problems:
        raise UsageError(together("The command line", problems))
    return list(overrides.values())


def _partition(text: str) -> tuple[str, str, str]:
    quoted = False
    for position, character in enumerate(text):
        quoted ^= character == '"'
        if character == "=" and not quoted:
            return text[:position], "=", text[position + 1 :]
    return text, "", ""


def apply(root: Branch, overrides: Sequence[Override], schema: Schema) -> list[Dropped]:
    """Change the tree in place; what choices of entries dropped is returned. All that is wrong is reported in one UsageError."""
    work = _Application(root, schema)
    work.choose(overrides)
    work.assign(overrides)
    if work.problems:
        raise UsageError(together("The command line", work.problems))
    return work.dropped


class _Application:
    """One pass over the tree: structure first, then values."""

    def __init__(self, root: Branch, schema: Schema):
        self.root, self.schema = root, schema
        self.problems: list[str] = []
        self.dropped: list[Dropped] = []
        self.used: set[str] = set()
        self.exact: set[str] = set()

    def slots(self) -> list[Slot]:
        return list(self.schema.slots(self.root, Recipe))

    def choose(self, overrides: Sequence[Override]) -> None:
        """Apply what changes which places exist, shallowest first, until nothing is left of it."""
        done: set[tuple[str, str]] = set()
        while True:
            slots = [slot for slot in self.slots() if not isinstance(slot.shape, Leaf)]
            found: list[tuple[Override, Slot, str | None]] = []
            for override in overrides:
                found += [(override, slot, None) for slot in slots if matches(override.pattern, slot.segments)]
                found += [(override, *growth) for growth in self._growths(override, slots)]
            found = [hit for hit in found if (hit[0].text, join(hit[1].path, hit[2] or "-")) not in done]
            if not found:
                return
            found.sort(key=lambda hit: int(hit[2]) if (hit[2] or "").isdecimal() else -1)
            depth = min(len(slot.segments) + (key is not None) for _, slot, key in found)
            for override, slot, key in found:
                if len(slot.segments) + (key is not None) == depth:
                    done.add((override.text, join(slot.path, key or "-")))
                    self._guarded(override, slot, key)

    def _growths(self, override: Override, slots: list[Slot]) -> list[tuple[Slot, str]]:
        """Items that the override would add: (tuple, mapping of nodes or absent optional node; the key to add)."""
        growths = []
        for length in range(1, len(override.written)):
            key = override.pattern[length]
            if not isinstance(key, str) or not isinstance(override.pattern[length - 1], str):
                continue
            for slot in slots:
                children = slot.branch.children if slot.branch else {}
                grows = isinstance(slot.shape, Many) or (isinstance(slot.shape, Table) and isinstance(slot.shape.item, Node))
                absent = isinstance(slot.shape, Node) and slot.node is None and self.schema.is_plain(slot.shape)
                if (absent or (grows and key not in children)) and matches(override.pattern[:length], slot.segments):
                    growths.append((slot, key))
        return growths

    def _guarded(self, override: Override, slot: Slot, key: str | None) -> None:
        try:
            if key is not None:
                self._add(override, slot, key)
                return
            self.used.add(override.text)
            if slot.path not in self.exact or override.exact:
                self._replace(override, slot)
                self.exact |= {slot.path} if override.exact else set()
        except (IntarsiaError, ValueError) as error:
            self.used.add(override.text)
            self.problems.append(f"{override.text!r}: {error}")

    def _add(self, override: Override, slot: Slot, key: str) -> None:
        branch = slot.parent.children.setdefault(slot.segments[-1], Branch([], override.source))
        if isinstance(slot.shape, Node):
            branch.value, branch.source = MISSING, override.source
            self.schema.seed(branch, slot.shape.declared, slot.path)
            return
        assert not isinstance(slot.shape, Leaf)
        if key in branch.children:
            return
        item, count, path = slot.shape.item, len(branch.children), join(slot.path, key)
        if isinstance(slot.shape, Many) and key != str(count):
            raise ValueError(f"`{slot.path}` holds {count} so far, so the next one is `{join(slot.path, str(count))}`")
        child = Branch(MISSING, override.source)
        assert isinstance(item, Node)
        if self.schema.is_plain(item):
            self.schema.seed(child, item.declared, path)
        elif isinstance(slot.shape, Table) and len(override.written) > len(slot.segments) + 1:
            child.value, node = self.schema.choose(key, item, path)
            self.schema.seed(child, node, path)
        branch.value = MISSING
        branch.children[key] = child

    def _replace(self, override: Override, slot: Slot) -> None:
        branch = slot.parent.children.setdefault(slot.segments[-1], Branch(MISSING, override.source))
        shape, text = slot.shape, override.value.strip()
        if isinstance(shape, Node):
            if text.lower() in ("none", "null") and shape.optional:
                self._drop(branch, slot.path, override)
                branch.value, branch.source = None, override.source
                return
            name, node = self.schema.choose(text, shape, slot.path)
            if branch.value != name:
                self._drop(branch, slot.path, override)
                self.schema.seed(branch, node, slot.path)
            branch.value, branch.source = name, override.source
            return
        assert not isinstance(shape, Leaf)
        items = self._items(shape, text, slot.path)
        self._drop(branch, slot.path, override)
        branch.value = MISSING if items else [] if isinstance(shape, Many) else {}
        branch.children, branch.source = items, override.source
        for child in items.values():
            child.source = override.source

    def _items(self, shape: Many | Table, text: str, path: str) -> dict[str, Branch]:
        """A whole tuple of nodes (names of entries) or mapping (a JSON object) from text."""
        names = shapes.Leaf(rest=shapes.Leaf(frozenset({str})))
        if isinstance(shape, Many):
            given = {str(index): name for index, name in enumerate(shapes.parse(text, names))}
        else:
            given = shapes.read_object(text)
        items = {}
        for key, value in given.items():
            items[key] = Branch(shapes.plain(shapes.check(value, shape.item))) if isinstance(shape.item, Leaf) else Branch()
            if isinstance(shape.item, Node):
                items[key].value, node = self.schema.choose(value, shape.item, join(path, key))
                self.schema.seed(items[key], node, join(path, key))
        return items

    def _drop(self, branch: Branch, path: str, override: Override) -> None:
        beneath = [entry for entry in branch.flat(path) if entry[0] != path]
        self.dropped += [Dropped(key, gone.value, gone.source, override.text) for key, gone in beneath]
        branch.children = {}

    def assign(self, overrides: Sequence[Override]) -> None:
        """Set plain values; globs first, so that exact paths beat them."""
        slots = self.slots()
        tables = [slot for slot in slots if isinstance(slot.shape, Table) and isinstance(slot.shape.item, Leaf)]
        for override in sorted(overrides, key=lambda override: override.exact):
            hits = [slot for slot in slots if isinstance(slot.shape, Leaf) and matches(override.pattern, slot.segments)]
            if len(override.written) > 1 and isinstance(override.pattern[-2], str) and override.written[-1] != SPREAD:
                key = unquote(override.written[-1])
                beside = [table for table in tables if matches(override.pattern[:-1], table.segments)]
                if beside:
                    hits = [Slot(join(table.path, key), (*table.segments, key), table.shape.item, *self._row(table)) for table in beside]  # type: ignore[union-attr]
            for slot in hits:
                self._set(override, slot)
            if not hits and override.text not in self.used:
                self.problems.append(f"{override.text!r}: {self.unmatched(override, slots)}")

    def _row(self, table: Slot) -> tuple[Branch, None]:
        branch = table.parent.children.setdefault(table.segments[-1], Branch())
        branch.value = MISSING
        return branch, None

    def _set(self, override: Override, slot: Slot) -> None:
        assert isinstance(slot.shape, Leaf)
        try:
            value = shapes.plain(shapes.parse(override.value, slot.shape))
        except ValueError as error:
            self.problems.append(f"`{slot.path}`: {error}" if override.exact else f"{override.text!r} at `{slot.path}`: {error}")
            return
        branch = slot.parent.children.setdefault(slot.segments[-1], Branch())
        branch.value, branch.source = value, override.source

    # ------------------------------------------------------------ what nothing matched

    def unmatched(self, override: Override, slots: list[Slot]) -> str:
        """Why an override names no place, and what may have been meant."""
        last, known = unquote(override.written[-1]), {slot.segments[-1] for slot in slots}
        elsewhere = list(dict.fromkeys(folded(slot.path) for slot in slots if slot.segments[-1] == last))
        places = f" `{last}` is at {', '.join(f'`{path}`' for path in elsewhere[:3])}." if elsewhere else ""
        if not override.exact:
            return f"the glob matches nothing.{places or ' ' + did_you_mean(last, known)}"
        return self._wrong_step(override, slots, places)

    def _wrong_step(self, override: Override, slots: list[Slot], places: str) -> str:
        at, node, shape = "", Recipe, ROOT
        by_path = {slot.path: slot for slot in slots}
        for index, written in enumerate(override.written):
            path = join(at, unquote(written))
            if path in by_path:
                at, node, shape = path, by_path[path].node, by_path[path].shape  # type: ignore[assignment]
                continue
            if isinstance(shape, Leaf):
                return f"`{at}` is one value ({shapes.describe(shape)}), nothing can be set beneath it."
            if isinstance(shape, Many):
                return f"`{at}` is a tuple: {written!r} is no index of it."
            if isinstance(shape, Table):
                return f"`{at}` holds plain values by key, nothing can be set beneath `{path}`."
            if node is None:
                return f"nothing stands at `{at}` yet: choose first, `{at}=NAME`. {did_you_mean('', self._names(shape))}"
            rest = [unquote(segment) for segment in override.written[index + 1 :]]
            close = [".".join([join(at, field), *rest]) for field in nearest(unquote(written), self.schema.fields(node))]
            whole = [path for path in close if path in by_path]
            if whole:
                return f"there is no `{path}`. Did you mean {' or '.join(f'`{hit}`' for hit in whole)}?"
            return self.schema.unknown_field(at, unquote(written), node, places)
        return "it names no place."

    def _names(self, shape: Any) -> list[str]:
        kind = self.schema.kind(shape.declared) if isinstance(shape, Node) else None
        return self.schema.plugins.registry(kind).names() if kind else []
