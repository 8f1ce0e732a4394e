"""Overrides from the command line: `optimizer=muon`, `optimizer.lr=0.02`, `...window=128`, `data.mixture.1.source=text`.

Choices of entries come first, from the root downwards, then values: the order on the command line does not matter. A path without
wildcards beats a glob; of two globs that meet, the later one wins.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from chz.util import MISSING

from intarsia.config import shapes
from intarsia.config.paths import Matcher, folded, join, matcher, matches, split, unquote
from intarsia.config.recipe import Recipe
from intarsia.config.shapes import Leaf, Many, Node, Table
from intarsia.config.tree import ROOT, Branch, Dropped, Schema, Slot, together
from intarsia.errors import IntarsiaError, UsageError, did_you_mean, nearest

_ASSIGNMENT = re.compile(r'((?:"(?:[^"\\]|\\.)*"|[^="])+)=(.*)', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Override:
    """One `path=value` as given: `written` are the segments as they stand there, `pattern` what they accept."""

    text: str
    path: str
    written: tuple[str, ...]
    pattern: tuple[Matcher, ...]
    value: str

    @property
    def exact(self) -> bool:
        """Whether it names one path."""
        return all(isinstance(accepted, str) for accepted in self.pattern)

    @property
    def source(self) -> str:
        """Who set it, for provenance: a glob is named, since it is not the path."""
        return "command line" if self.exact else f"command line ({self.path})"

    def hits(self, slot: Slot) -> bool:
        """Whether it names this place. Beneath a mapping of plain values the last segment is a key and no glob (`kernels.*`)."""
        if slot.is_key and len(self.pattern) > 1 and isinstance(self.pattern[-2], str):
            return unquote(self.written[-1]) == slot.segments[-1] and matches(self.pattern[:-1], slot.segments[:-1])
        return matches(self.pattern, slot.segments)


def read(texts: Sequence[str]) -> list[Override]:
    """The overrides of a command line. A path given twice with different values is an error, as is a text that is no `path=value`."""
    overrides: dict[tuple[str, ...], Override] = {}
    problems = []
    for text in texts:
        try:
            parts = _ASSIGNMENT.fullmatch(text)
            if not parts:
                raise ValueError("it is not PATH=VALUE (for example `optimizer.lr=0.01`); a transform is chosen by `--with NAME`")
            written = tuple(split(parts[1].strip()))
            new = Override(text, parts[1].strip(), written, tuple(map(matcher, written)), parts[2])
            old = overrides.setdefault(written, new)
            if old.value != new.value:
                raise ValueError(f"it sets the same path as {old.text!r} to a different value; give it once")
        except ValueError as error:
            problems.append(f"{text!r}: {error}")
    if problems:
        raise UsageError(together("The command line", problems))
    return list(overrides.values())


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

    def choose(self, overrides: Sequence[Override]) -> None:
        """Apply what changes which places exist, shallowest first, until nothing is left of it."""
        done: set[tuple[str, str, str]] = set()
        while True:
            slots = [slot for slot in self.schema.slots(self.root, Recipe) if not isinstance(slot.shape, Leaf)]
            found = [(override, slot, "") for override in overrides for slot in slots if override.hits(slot)]
            found += [(override, *growth) for override in overrides for growth in self._growths(override, slots)]
            found = [hit for hit in found if (hit[0].text, hit[1].path, hit[2]) not in done]
            if not found:
                return
            depth = min(len(slot.segments) + bool(key) for _, slot, key in found)
            found = [(override, slot, key) for override, slot, key in found if len(slot.segments) + bool(key) == depth]
            done |= {(override.text, slot.path, key) for override, slot, key in found}
            for override, slot, key in sorted(found, key=lambda hit: int(hit[2]) if hit[2].isdecimal() else -1):
                try:
                    self._change(override, slot, key)
                except (IntarsiaError, ValueError) as error:
                    self.used.add(override.text)
                    self.problems.append(f"{override.text!r}: {error}")

    def _growths(self, override: Override, slots: list[Slot]) -> list[tuple[Slot, str]]:
        """What the override would add: (tuple or mapping; the new key), or (an absent optional core node; its field)."""
        growths = []
        for length in range(1, len(override.written)):
            if not isinstance(override.pattern[length - 1], str):
                continue
            for slot in slots:
                leaves = isinstance(slot.shape, Table) and isinstance(slot.shape.item, Leaf)
                fits = isinstance(override.pattern[length], str) or (leaves and length + 1 == len(override.written))
                absent = isinstance(slot.shape, Node) and slot.node is None and self.schema.is_plain(slot.shape)
                key = unquote(override.written[length])
                lacks = not isinstance(slot.shape, Node) and (slot.branch is None or key not in slot.branch.children)
                if fits and (absent or lacks) and matches(override.pattern[:length], slot.segments):
                    growths.append((slot, key))
        return growths

    def _change(self, override: Override, slot: Slot, key: str) -> None:
        branch = slot.parent.children.setdefault(slot.segments[-1], Branch(MISSING, override.source))
        if key:
            return self._add(override, slot, key, branch)
        self.used.add(override.text)
        if slot.path not in self.exact or override.exact:
            before = dict(branch.children)
            self.schema.put(branch, slot.shape, slot.path, _meaning(override.value, slot), override.source)
            gone = [child for name, child in before.items() if branch.children.get(name) is not child]
            paths = {id(child): join(slot.path, name) for name, child in before.items()}
            self.dropped += [
                Dropped(path, old.value, old.source, override.text) for child in gone for path, old in child.flat(paths[id(child)])
            ]
            self.exact |= {slot.path} if override.exact else set()
        return None

    def _add(self, override: Override, slot: Slot, key: str, branch: Branch) -> None:
        if isinstance(slot.shape, Node):
            branch.value, branch.source = MISSING, override.source
            return self.schema.seed(branch, slot.shape.declared, slot.path)
        assert not isinstance(slot.shape, Leaf)
        item, path = slot.shape.item, join(slot.path, key)
        if isinstance(slot.shape, Many) and key not in (str(len(branch.children)), *branch.children):
            raise ValueError(
                f"`{slot.path}` holds {len(branch.children)} so far, so the next one is `{join(slot.path, str(len(branch.children)))}`"
            )
        child = branch.children.setdefault(key, Branch(MISSING, override.source))
        branch.value = MISSING
        if isinstance(item, Node) and self.schema.is_plain(item) and not child.children:
            self.schema.seed(child, item.declared, path)
        elif isinstance(item, Node) and isinstance(slot.shape, Table) and len(override.written) > len(slot.segments) + 1:
            self.schema.put(child, item, path, key, override.source)
        return None

    def assign(self, overrides: Sequence[Override]) -> None:
        """Set plain values; globs first, so that exact paths beat them."""
        slots = list(self.schema.slots(self.root, Recipe))
        for override in sorted(overrides, key=lambda override: override.exact):
            hits = [slot for slot in slots if isinstance(slot.shape, Leaf) and override.hits(slot)]
            for slot in hits:
                try:
                    branch = slot.parent.children.setdefault(slot.segments[-1], Branch())
                    self.schema.put(branch, slot.shape, slot.path, _meaning(override.value, slot), override.source)
                except ValueError as error:
                    self.problems.append(f"`{slot.path}`: {error}" if override.exact else f"{override.text!r} at `{slot.path}`: {error}")
            if not hits and override.text not in self.used:
                self.problems.append(f"{override.text!r}: {self._unmatched(override, slots)}")

    def _unmatched(self, override: Override, slots: list[Slot]) -> str:
        """Why an override names no place, and what may have been meant."""
        last, by_path = unquote(override.written[-1]), {slot.path: slot for slot in slots}
        elsewhere = list(dict.fromkeys(folded(slot.path) for slot in slots if slot.segments[-1] == last))
        places = f" `{last}` is at {', '.join(f'`{path}`' for path in elsewhere[:3])}." if elsewhere else ""
        if not override.exact:
            return f"the glob matches nothing.{places or ' ' + did_you_mean(last, {slot.segments[-1] for slot in slots})}"
        at, shape, node = "", ROOT, Recipe
        names = [unquote(segment) for segment in override.written]
        while (path := join(at, names[0])) in by_path:
            at, shape, node = path, by_path[path].shape, by_path[path].node  # type: ignore[assignment]
            names.pop(0)
        if not isinstance(shape, Node):
            what = f"is one value ({shapes.describe(shape)})" if isinstance(shape, Leaf) else f"holds no {names[0]!r}"
            return f"`{at}` {what}: nothing can be set beneath `{at if isinstance(shape, Leaf) else path}`."
        if node is None:
            return f"nothing stands at `{at}` yet: choose first, `{at}=NAME`, a {self.schema.kind(shape.declared)}."
        close = [".".join([join(at, field), *names[1:]]) for field in nearest(names[0], self.schema.fields(node))]
        whole = " or ".join(f"`{path}`" for path in close if path in by_path)
        return f"there is no `{path}`. Did you mean {whole}?" if whole else self.schema.unknown_field(at, names[0], node, places)


def _meaning(text: str, slot: Slot) -> Any:
    """The plain value that the text of an override means at a place."""
    if isinstance(slot.shape, Leaf):
        return shapes.parse(text, slot.shape)
    if isinstance(slot.shape, Node):
        return None if slot.shape.optional and text.strip().lower() in ("none", "null") else text.strip()
    if isinstance(slot.shape, Many):
        return dict(zip(map(str, range(len(text))), shapes.parse(text, shapes.NAMES), strict=False))
    return shapes.read_object(text)
