"""A recipe as a tree of plain values with who set each, and its flat form; both ways, driven by the types of the config classes.

Only names of registry entries and plain values exist here: nothing in a tree can make code run. chz's own factories (which
evaluate strings) are never called.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from chz.util import MISSING

from intarsia.config import shapes
from intarsia.config.bases import Config
from intarsia.config.paths import join, split, unquote
from intarsia.config.recipe import Recipe
from intarsia.config.shapes import Leaf, Many, Node, Shape, Table
from intarsia.errors import IntarsiaError, PluginError, UsageError, did_you_mean
from intarsia.plugins import Plugins

DEFAULT = "default"


class Branch:
    """One path of the tree: its plain value (MISSING where there is only something beneath), who set it, and what is beneath."""

    __slots__ = ("children", "source", "value")

    def __init__(self, value: Any = MISSING, source: str = ""):
        self.value = value
        self.source = source
        self.children: dict[str, Branch] = {}

    def flat(self, path: str = "") -> Iterator[tuple[str, Branch]]:
        """Every path with a value, in order."""
        if self.value is not MISSING:
            yield path, self
        for segment, child in self.children.items():
            yield from child.flat(join(path, segment))


@dataclasses.dataclass(frozen=True)
class Dropped:
    """A value that vanished because the entry above it was replaced; `by` says by what."""

    path: str
    value: Any
    source: str
    by: str


@dataclasses.dataclass(frozen=True)
class FieldFacts:
    """A field of a config class: its shape, and its default if it has one."""

    name: str
    shape: Shape
    attribute: str
    required: bool
    default: Callable[[], Any]


@dataclasses.dataclass
class Slot:
    """A place in the tree that a path can name. `branch` is None where a required value is missing; `node` is the class standing at a node's
    place; `is_key` says that it is a plain value in a mapping."""

    path: str
    segments: tuple[str, ...]
    shape: Shape
    parent: Branch
    branch: Branch | None
    node: type[Config] | None = None
    is_key: bool = False


class Schema:
    """What the types and the loaded plugins allow to stand where."""

    def __init__(self, plugins: Plugins):
        self.plugins = plugins
        self._fields: dict[type[Config], dict[str, FieldFacts]] = {}
        self._names: dict[type[Config], str] = {}
        self._kinds: dict[type[Config], str | None] = {}
        self._chosen: dict[tuple[str, type[Config]], tuple[str, type[Config]]] = {}

    def fields(self, node: type[Config]) -> dict[str, FieldFacts]:
        """The fields of a config class by name, in declared order."""
        if node not in self._fields:
            facts = {}
            for field in node.__chz_fields__.values():  # type: ignore[attr-defined]
                name, where = field.logical_name, f"{node.__module__}.{node.__qualname__}.{field.logical_name}"
                factory = field._default_factory
                default = factory if factory is not MISSING else (lambda value=field._default: value)
                required = factory is MISSING and field._default is MISSING
                facts[name] = FieldFacts(name, shapes.shape_of(field.x_type, where), field.x_name, required, default)
            self._fields[node] = facts
        return self._fields[node]

    def kind(self, declared: type[Config]) -> str | None:
        """The kind whose entries may stand where `declared` is, None where the class itself stands there."""
        if declared not in self._kinds:
            bases = {kind: self.plugins.registry(kind).base.partition(":") for kind in self.plugins.kinds()}
            # A class that `declared` derives from is loaded already: no base is imported for the question.
            found = {kind: getattr(sys.modules.get(module), name, None) for kind, (module, _, name) in bases.items()}
            fitting = {kind: base for kind, base in found.items() if isinstance(base, type) and issubclass(declared, base)}
            self._kinds[declared] = max(fitting, key=lambda kind: len(fitting[kind].__mro__), default=None)
        return self._kinds[declared]

    def is_plain(self, shape: Node) -> bool:
        """Whether the class itself stands there without a choice (no base of a kind)."""
        return self.kind(shape.declared) is None

    def entry_name(self, node: type[Config], shape: Node, path: str) -> str | None:
        """`owner:name` of the entry that `node` belongs to; None for a plain core node."""
        if self.is_plain(shape):
            if node is shape.declared:
                return None
            where = f"`{path}` holds a {node.__name__}" if path else f"the recipe is a {node.__name__}"
            raise UsageError(f"{where}; only {shape.declared.__name__} itself can stand there, not a subclass of it.")
        if node not in self._names:
            try:
                self._names[node] = self.plugins.entry_of(node).full_name
            except PluginError as error:
                raise PluginError(f"`{path}` cannot be written down by name: {error}") from error
        return self._names[node]

    def choose(self, name: str, shape: Node, path: str) -> tuple[str, type[Config]]:
        """Full name and config class of the entry that `name` chooses at `path`."""
        if (name, shape.declared) not in self._chosen:
            self._chosen[name, shape.declared] = self._choose(name, shape, path)
        return self._chosen[name, shape.declared]

    def _choose(self, name: str, shape: Node, path: str) -> tuple[str, type[Config]]:
        kind = self.kind(shape.declared)
        if kind is None:
            raise UsageError(
                f"`{path}` is always a {shape.declared.__name__}: set its fields one by one ({path}.FIELD=VALUE), not {name!r}."
            )
        try:
            entry = self.plugins.registry(kind).find(name)
        except IntarsiaError as error:
            raise type(error)(f"`{path}`: {error}{self.missing_plugin(name)}") from error
        node = self.plugins.config_class(entry)
        if not issubclass(node, shape.declared):
            raise UsageError(f"`{path}` takes a {shape.declared.__name__}, which {entry.full_name} ({node.__name__}) is not.")
        return entry.full_name, node

    def missing_plugin(self, name: str) -> str:
        """A sentence on the plugin behind an unknown `owner:name`, when it is not there."""
        owner = name.rpartition(":")[0]
        known = {candidate.distribution for candidate in self.plugins.skipped} | {failure.distribution for failure in self.plugins.failures}
        known |= {entry.owner for kind in self.plugins.kinds() for entry in self.plugins.registry(kind).entries()}
        return "" if not owner or owner in known else f" No plugin {owner!r} is installed here."

    # ------------------------------------------------------------ value -> tree

    def grow(self, value: Any, shape: Shape, path: str, source: str, default: Any = MISSING) -> Branch:
        """The tree of a value; what equals the default beneath which it stands is marked as default."""
        if default is not MISSING and type(value) is type(default) and value == default:
            source = DEFAULT
        if value is None or isinstance(shape, Leaf):
            return Branch(shapes.plain(value), source)
        if isinstance(shape, Node):
            branch = Branch(self.entry_name(type(value), shape, path) or MISSING, source)
            for name, field in self.fields(type(value)).items():
                assumed = MISSING if field.required or source == DEFAULT else field.default()
                branch.children[name] = self.grow(getattr(value, field.attribute), field.shape, join(path, name), source, assumed)
            if not branch.children and branch.value is MISSING:
                branch.value = {}
            return branch
        items = value.items() if isinstance(shape, Table) else ((str(index), item) for index, item in enumerate(value))
        branch = Branch(MISSING, source)
        for segment, item in items:
            branch.children[segment] = self.grow(item, shape.item, join(path, segment), source)
        if not branch.children:
            branch.value = {} if isinstance(shape, Table) else []
        return branch

    def seed(self, branch: Branch, node: type[Config], path: str) -> None:
        """Put the defaults of `node` beneath an emptied branch."""
        branch.children = {}
        for name, field in self.fields(node).items():
            if not field.required:
                branch.children[name] = self.grow(field.default(), field.shape, join(path, name), DEFAULT)
            elif isinstance(field.shape, Node) and self.is_plain(field.shape) and not field.shape.optional:
                self.seed(branch.children.setdefault(name, Branch()), field.shape.declared, join(path, name))
        if branch.value is MISSING and not branch.children:
            branch.value = {}

    def put(self, branch: Branch, shape: Shape, path: str, value: Any, source: str) -> None:
        """Set what stands at a place: a plain value, an entry's name (or None), or a dict of what is beneath. Another entry than the one that stands
        there brings its defaults; the same one changes nothing. Raises ValueError or UsageError where the value does not fit."""
        if isinstance(shape, Leaf):
            branch.value, branch.children = shapes.plain(shapes.check(value, shape)), {}
        elif isinstance(shape, Node):
            name, node = (None, None) if value is None and shape.optional else self.choose(value, shape, path)
            if branch.value != name or branch.value is None:
                branch.value, branch.children = name, {}
                if node is not None:
                    self.seed(branch, node, path)
        elif isinstance(value, dict):
            branch.children = {key: Branch() for key in value}
            branch.value = MISSING if value else [] if isinstance(shape, Many) else {}
            for key, child in branch.children.items():
                self.put(child, shape.item, join(path, key), value[key], source)
        else:
            raise UsageError(f"`{path}` is no plain value: set what is beneath it one by one.")
        branch.source = source

    # ------------------------------------------------------------ tree -> value

    def node_at(self, branch: Branch | None, shape: Node, path: str) -> type[Config] | None:
        """The class that stands at a node's place; None where there is nothing, or nothing yet."""
        if branch is None or branch.value is None:
            return None
        if branch.value is MISSING or branch.value == {}:
            return shape.declared if self.is_plain(shape) else None
        if not isinstance(branch.value, str):
            raise UsageError(f"`{path}`: expected the name of an entry, got {branch.value!r}")
        return self.choose(branch.value, shape, path)[1]

    def build(self, branch: Branch | None, shape: Shape, path: str, problems: list[str]) -> Any:
        """The value of a tree. What is wrong is added to `problems`, and the value is then MISSING or unusable."""
        try:
            if isinstance(shape, Leaf):
                return self._build_leaf(branch, shape, path)
            if branch is None:
                raise UsageError(f"`{path}` is required and not set")
            if isinstance(shape, Node):
                return self._build_node(branch, shape, path, problems)
            return self._build_items(branch, shape, path, problems)
        except (IntarsiaError, ValueError) as error:
            problems.append(str(error) if isinstance(error, IntarsiaError) else f"`{path}`: {error}")
            return MISSING

    def _build_leaf(self, branch: Branch | None, shape: Leaf, path: str) -> Any:
        if branch is None or branch.value is MISSING:
            beneath = f" (nothing can be set beneath it: {', '.join(branch.children)})" if branch and branch.children else ""
            raise UsageError(f"`{path}` is required and not set; expected {shapes.describe(shape)}{beneath}")
        if branch.children:
            raise UsageError(f"`{path}` is one value, nothing can be set beneath it: `{join(path, next(iter(branch.children)))}`")
        return shapes.check(branch.value, shape)

    def _build_node(self, branch: Branch, shape: Node, path: str, problems: list[str]) -> Any:
        if branch.value is None and shape.optional and not branch.children:
            return None
        node = self.node_at(branch, shape, path)
        if node is None:
            raise UsageError(
                f"`{path}` is required and not set; expected the name of a {self.kind(shape.declared)}{' or none' if shape.optional else ''}"
            )
        fields, before = self.fields(node), len(problems)
        for segment in branch.children:
            if segment not in fields:
                problems.append(self.unknown_field(path, segment, node))
        values = {}
        for name, field in fields.items():
            child = branch.children.get(name)
            if child is None and isinstance(field.shape, Node) and self.is_plain(field.shape) and not field.shape.optional:
                child = Branch() if field.required else None
            if child is not None or field.required:
                values[name] = self.build(child, field.shape, join(path, name), problems)
        if len(problems) > before:
            return MISSING
        try:
            return node(**values)
        except IntarsiaError:
            raise
        except Exception as error:  # a validator of the class: whatever it raises concerns this node
            raise UsageError(f"`{path}` ({node.__name__}): {error}" if path else f"The recipe: {error}") from error

    def _build_items(self, branch: Branch, shape: Many | Table, path: str, problems: list[str]) -> Any:
        empty: Any = [] if isinstance(shape, Many) else {}
        if branch.value not in (MISSING, empty) or (branch.value == empty and branch.children):
            what = "an index" if isinstance(shape, Many) else "a key"
            raise UsageError(f"`{path}`: expected {what} and a value beneath it, or {empty} where there is none; got {branch.value!r}")
        if isinstance(shape, Table):
            return {key: self.build(child, shape.item, join(path, key), problems) for key, child in branch.children.items()}
        count = len(branch.children)
        if stray := [key for key in branch.children if key not in {str(index) for index in range(count)}]:
            raise UsageError(f"`{path}` holds {count} items, numbered from 0 without gaps; `{join(path, stray[0])}` is not one of them")
        return tuple(self.build(branch.children[str(index)], shape.item, join(path, str(index)), problems) for index in range(count))

    def unknown_field(self, path: str, name: str, node: type[Config], elsewhere: str = "") -> str:
        """The message for a field that a node lacks; `elsewhere` is a sentence on where it is."""
        where = f"`{path}` ({node.__name__})" if path else "the recipe"
        return f"`{join(path, name)}`: {where} has no field {name!r}.{elsewhere or ' ' + did_you_mean(name, self.fields(node))}"

    # ------------------------------------------------------------ places

    def slots(self, branch: Branch, node: type[Config], path: str = "", segments: tuple[str, ...] = ()) -> Iterator[Slot]:
        """Every place beneath a node that a path can name: its fields, and theirs; items of tuples, keys of mappings."""
        for name, field in self.fields(node).items():
            yield from self._slot(Slot(join(path, name), (*segments, name), field.shape, branch, branch.children.get(name)))

    def _slot(self, slot: Slot) -> Iterator[Slot]:
        branch, shape = slot.branch, slot.shape
        slot.node = self.node_at(branch, shape, slot.path) if isinstance(shape, Node) else None
        yield slot
        if branch is not None and slot.node is not None:
            yield from self.slots(branch, slot.node, slot.path, slot.segments)
        elif branch is not None and isinstance(shape, (Many, Table)):
            for key, child in branch.children.items():
                is_key = isinstance(shape, Table) and isinstance(shape.item, Leaf)
                yield from self._slot(Slot(join(slot.path, key), (*slot.segments, key), shape.item, branch, child, is_key=is_key))


ROOT = Node(Recipe)


def plant(values: Mapping[str, Any], source: str) -> Branch:
    """A tree from flat values; types are not looked at. Raises UsageError where a path is malformed."""
    root = Branch()
    for path, value in values.items():
        branch = root
        try:
            for segment in split(path):
                branch = branch.children.setdefault(unquote(segment), Branch(MISSING, source))
        except ValueError as error:
            raise UsageError(f"{source}: {error}") from error
        branch.value = value
    return root


def finish(root: Branch, schema: Schema, where: str) -> Recipe:
    """The recipe of a tree; everything that is wrong in it is reported in one error."""
    problems: list[str] = []
    recipe = schema.build(root, ROOT, "", problems)
    if problems:
        raise UsageError(together(where, problems))
    return recipe


def together(where: str, problems: list[str]) -> str:
    """One message of several problems."""
    problems = list(dict.fromkeys(problems))
    return f"{where}: {problems[0]}" if len(problems) == 1 else f"{where}:\n" + "\n".join(f"  - {problem}" for problem in problems)


def flatten(recipe: Recipe, plugins: Plugins) -> dict[str, Any]:
    """Path to plain value for everything in the recipe: the exact inverse of `rebuild`. Stability: provisional.

    A node whose class was chosen from a registry has `owner:name` at its own path; a tuple of plain values is one list; an empty tuple of
    nodes is [], an empty mapping {}, an absent node None.
    """
    schema = Schema(plugins)
    return {path: branch.value for path, branch in schema.grow(recipe, ROOT, "", "").flat()}


def rebuild(values: Mapping[str, Any], plugins: Plugins) -> Recipe:
    """The recipe of flat values. Fields that are not given take their defaults; UsageError names every unknown path, wrong type and missing value. Stability: provisional."""
    return finish(plant(values, "values"), Schema(plugins), "The values make no recipe")
