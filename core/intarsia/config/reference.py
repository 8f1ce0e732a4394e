"""Every field of a config class with type, default and doc, for reference pages. Types are shown as written: nothing is evaluated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from chz.util import MISSING

from intarsia.config import shapes
from intarsia.config.bases import Config
from intarsia.config.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class FieldDoc:
    """One field. `default` is as one would type it; None: required."""

    path: str
    type: str
    default: str | None
    doc: str


def fields(node: type[Config] = Recipe, path: str = "") -> Iterator[FieldDoc]:
    """The fields of a config class and of core nodes beneath it (`data.mixture.N.weight`), in order; a field that an entry fills is one row."""
    for field in node.__chz_fields__.values():  # type: ignore[attr-defined]
        where = f"{path}.{field.logical_name}" if path else field.logical_name
        shape = shapes.shape_of(field.x_type, where)
        beneath = shape.item if isinstance(shape, shapes.Many) else shape
        yield FieldDoc(where, str(field._raw_type), _default(field), field._doc)
        if isinstance(beneath, shapes.Node) and beneath.declared.__module__ == Recipe.__module__:
            yield from fields(beneath.declared, f"{where}.N" if isinstance(shape, shapes.Many) else where)


def _default(field: object) -> str | None:
    default, factory = field._default, field._default_factory  # type: ignore[attr-defined]
    if default is MISSING and factory is MISSING:
        return None
    value = factory() if default is MISSING else default
    if isinstance(value, Config):
        return f"{type(value).__name__}()"
    return shapes.show(shapes.plain(value)) if not isinstance(value, dict) else str(value)


def table(node: type[Config], path: str = "") -> str:
    """A Markdown table of `fields(node)`."""
    rows = [
        f"| `{row.path}` | `{row.type.replace('|', chr(92) + '|')}` | {_cell(row.default)} | {_escape(row.doc)} |"
        for row in fields(node, path)
    ]
    return "\n".join(["| Field | Type | Default | Meaning |", "| --- | --- | --- | --- |", *rows]) + "\n" if rows else "No settings.\n"


def markdown() -> str:
    """The reference table of the recipe and of every core node beneath it."""
    return table(Recipe)


def _cell(default: str | None) -> str:
    return "required" if default is None else f"`{default.replace('|', chr(92) + '|')}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
