"""How a conformance test says what is wrong."""

from __future__ import annotations

from typing import NoReturn

import pytest


def broken(promise: str, sentence: str) -> NoReturn:
    """Fail the test: which promise is broken, and by what."""
    pytest.fail(f"promise `{promise}` is broken: {sentence}", pytrace=False)


def keep(promise: str, kept: object, sentence: str) -> None:
    """Fail the test unless `kept`."""
    if not kept:
        broken(promise, sentence)
