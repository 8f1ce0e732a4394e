"""Numbers that others' code gives (an environment, a rubric, an algorithm, a generator), and how those that are none are told. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

SHOWN = 200
"""Characters of a value that are shown."""


def is_number(value: Any) -> bool:
    """Whether it is an int or float that is finite as a float, and no bool."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def finite(value: Any) -> float | None:
    """The float of what is a number to Python (one of numpy or torch as well); None where it is not finite, or is none: a text of digits is none."""
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        number = float(value)
    except Exception:  # whatever its class does
        return None
    return number if math.isfinite(number) else None


def told(value: Any) -> str:
    """A value in one line: the beginning of what it shows itself as, and its type where that does not say it."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # whatever its class does; and an int of thousands of digits
        text = f"what cannot be shown ({type(error).__name__})"
    text = text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
    return text if value is None or type(value) is float else f"{text} of type {type(value).__name__}"


def numbers_or_words(values: Iterable[Any]) -> list[float | str]:
    """Each as a float, or, where it is no finite number, what it is instead."""
    return [float(value) if is_number(value) else told(value) for value in values]
