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
