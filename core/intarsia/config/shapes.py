"""What a field of a recipe may hold, read from its type; and plain values checked, parsed and written accordingly."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import dataclasses
import decimal
import json
import math
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any

from intarsia.config.bases import Config
from intarsia.errors import PluginError, did_you_mean

Nothing = type(None)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A plain value: one of the scalar types, one of `literals`, or a tuple of leaves: `items`, of which the only one repeats if `repeats`."""

    scalars: frozenset[type] = frozenset()
    literals: tuple[Any, ...] = ()
    items: tuple[Leaf, ...] | None = None
    repeats: bool = False

    def zip(self, values: Sequence[Any]) -> list[tuple[Any, Leaf]]:
        """Each value of a tuple with its leaf. Raises ValueError where this is no tuple of that length."""
        leaves = self.items and self.items * len(values) if self.repeats else self.items
        if leaves is None or len(leaves) != len(values):
            raise ValueError(f"expected {describe(self)}, got {values!r}")
        return list(zip(values, leaves, strict=True))


@dataclasses.dataclass(frozen=True)
class Node:
    """A config node whose class derives from `declared`."""

    declared: type[Config]
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Many:
    """A tuple of nodes."""

    item: Node


@dataclasses.dataclass(frozen=True)
class Table:
    """A mapping from str to leaves or nodes."""

    item: Leaf | Node


Shape = Leaf | Node | Many | Table
NAMES = Leaf(items=(Leaf(frozenset({str})),), repeats=True)
SCALARS = (bool, int, float, str, Nothing)
TRUE = {"true", "yes", "on", "1"}
FALSE = {"false", "no", "off", "0"}


def shape_of(annotation: Any, where: str) -> Shape:
    """The shape of a field's type. A type that a recipe cannot hold is an error of the class's author."""
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    nodes = [option for option in options if isinstance(option, type) and issubclass(option, Config)]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if len(nodes) == 1 and set(options) - set(nodes) <= {Nothing}:
        return Node(nodes[0], optional=len(options) > 1)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        item = shape_of(arguments[0], where)
        if isinstance(item, Node) and not item.optional:
            return Many(item)
    if origin in (dict, collections.abc.Mapping) and arguments[0] is str:
        item = shape_of(arguments[1], where)
        if isinstance(item, (Leaf, Node)):
            return Table(item)
    leaf = _leaf(options) if not nodes else None
    if leaf is None:
        raise PluginError(
            f"{where} has the type {annotation}, which a recipe cannot hold. Fields are bool, int, float, str, None, Literal, tuples of these, "
            "config nodes (or None), tuples of nodes, or mappings from str to plain values or nodes."
        )
    return leaf


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _leaf(options: tuple[Any, ...]) -> Leaf | None:
    rest = [option for option in options if option not in SCALARS and typing.get_origin(option) is not typing.Literal]
    literals = tuple(value for option in options if typing.get_origin(option) is typing.Literal for value in typing.get_args(option))
    leaf = Leaf(frozenset(option for option in options if option in SCALARS), literals)
    if not rest:
        return leaf
    if len(rest) > 1 or typing.get_origin(rest[0]) is not tuple:
        return None
    arguments = typing.get_args(rest[0])
    repeats = arguments[-1:] == (Ellipsis,)
    items = tuple(_leaf(typing.get_args(item) if _is_union(item) else (item,)) for item in (arguments[:1] if repeats else arguments))
    return None if None in items else dataclasses.replace(leaf, items=items, repeats=repeats)  # type: ignore[arg-type]


def describe(shape: Leaf) -> str:
    """The type in words for messages."""
    names = [kind.__name__ for kind in SCALARS if kind in shape.scalars and kind is not Nothing]
    names += ["one of " + ", ".join(repr(value) for value in shape.literals)] if shape.literals else []
    if shape.items is not None:
        names.append(f"a list of {', '.join(map(describe, shape.items))} (`1,2,3` or JSON)")
    return " or ".join([*names, *(["none"] if Nothing in shape.scalars else [])])


def check(value: Any, shape: Leaf) -> Any:
    """The plain `value` (as read from JSON) if it fits, tuples as tuples. Raises ValueError, saying what was expected."""
    kind = type(value)
    if isinstance(value, dict) and set(value) == {"float"} and float in shape.scalars:
        return float(str(value["float"]))
    if kind is str:
        value.encode()  # a lone surrogate (from JSON, or from a command line that is no UTF-8) could not be written down again
    if kind in shape.scalars or any(type(literal) is kind and literal == value for literal in shape.literals):
        return value
    if kind is int and float in shape.scalars and abs(value) <= sys.float_info.max:
        return value
    if kind in (list, tuple) and shape.items is not None:
        return tuple(check(entry, item) for entry, item in shape.zip(value))
    if kind is str and float in shape.scalars and value.lower().lstrip("+-") in ("inf", "nan"):
        return float(value)
    raise ValueError(f"expected {describe(shape)}, got {value!r}{_hint(value, shape)}")


def parse(text: str, shape: Leaf) -> Any:
    """The value that `text` from the command line means where `shape` is expected. Raises ValueError, saying what was expected."""
    stripped, lowered = text.strip(), text.strip().lower()
    if Nothing in shape.scalars and lowered in ("none", "null"):
        return None
    if bool in shape.scalars and lowered in TRUE | FALSE and not (lowered in "01" and int in shape.scalars):
        return lowered in TRUE
    if matching := [literal for literal in shape.literals if stripped == str(literal)]:
        return matching[0]
    for kind, read in ((int, _whole if float not in shape.scalars else int), (float, float)):
        if kind in shape.scalars:
            with contextlib.suppress(ValueError):
                return read(stripped)
    if shape.items is not None:
        with contextlib.suppress(*([ValueError] if str in shape.scalars else [])):
            return check(_list(stripped, shape), shape)
    if str in shape.scalars:
        return read_json(stripped, text) if stripped[:1] == '"' else text
    raise ValueError(f"expected {describe(shape)}, got {text!r}{_hint(stripped, shape)}")


def _hint(value: Any, shape: Leaf) -> str:
    choices = [literal for literal in shape.literals if isinstance(literal, str)]
    return f". {did_you_mean(value, choices)}" if choices and isinstance(value, str) else ""


def _whole(text: str) -> int:
    """An integer, also in the form 1e6. Raises ValueError where the number is none, or absurdly long."""
    with contextlib.suppress(ValueError):
        return int(text)
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation as error:
        raise ValueError(text) from error
    if not number.is_finite() or number.adjusted() > 40 or number != number.to_integral_value():
        raise ValueError(text)
    return int(number)


def _list(text: str, shape: Leaf) -> list[Any]:
    inner = text[1:-1] if text[:1] + text[-1:] in ("()", "[]") else text
    pieces = [piece.strip() for piece in inner.removesuffix(",").split(",")] if inner.strip() else []
    written = read_json(text, None) if text.startswith("[") else None
    return written if isinstance(written, list) else [parse(piece, item) for piece, item in shape.zip(pieces)]


def read_json(text: str, otherwise: Any) -> Any:
    """What JSON text means; `otherwise` where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def read_object(text: str) -> dict[str, Any]:
    """A JSON object; ValueError where it is none or names a key twice."""
    value = json.loads(text, object_pairs_hook=unique)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text!r}")
    json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` that refuses a key given twice."""
    counts = collections.Counter(key for key, _ in pairs)
    if doubled := [key for key, count in counts.items() if count > 1]:
        raise ValueError(f"the key {doubled[0]!r} is given more than once")
    return dict(pairs)


def plain(value: Any) -> Any:
    """A leaf as it is kept in flattened form: tuples as lists."""
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def encode(value: Any) -> Any:
    """A flattened value as strict JSON has it: floats that are not finite become `{"float": "inf"}`."""
    if isinstance(value, list):
        return [encode(item) for item in value]
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def show(value: Any) -> str:
    """A flattened value as a person would type it on the command line."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(json.dumps(item) if isinstance(item, str) else show(item) for item in value) + "]"
    return value if isinstance(value, str) and value else json.dumps(value)
