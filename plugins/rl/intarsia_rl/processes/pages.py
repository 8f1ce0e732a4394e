"""Long answers in pages: what all samples, tasks or groups of a run weigh together has no bound, and a message has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")

PAGE_BYTES = 8 << 20
"""From so many on a page is full; one item may be larger, and then is a page of its own."""

NUMBER_BYTES = 24
"""Of a number, as JSON."""
NUMBERS = {int, float, bool}


def size_of(value: Any) -> int:
    """About the bytes of a value in a message: of text one for each character."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value)
    if isinstance(value, Mapping):
        return sum(size_of(key) + size_of(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        # Tokens by the hundred thousand are counted at once; a number before text says nothing of the text.
        if value and isinstance(value[0], int | float) and set(map(type, value)) <= NUMBERS:
            return NUMBER_BYTES * len(value)
        return sum(map(size_of, value))
    if dataclasses.is_dataclass(value):
        return sum(size_of(getattr(value, field.name)) for field in dataclasses.fields(value))
    return NUMBER_BYTES


def pages(items: Sequence[Item], most: int | None = None) -> Iterator[list[Item]]:
    """The items in order, a page of at most `most` bytes at a time (None: `PAGE_BYTES`); at least one page, which is empty where there is no item."""
    most = PAGE_BYTES if most is None else most
    page: list[Item] = []
    size = 0
    for item in items:
        size_of_item = size_of(item)
        if page and size + size_of_item > most:
            yield page
            page, size = [], 0
        page.append(item)
        size += size_of_item
    yield page
