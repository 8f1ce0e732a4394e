"""What `tests/conftest.py` promises of random numbers and of examples."""

from __future__ import annotations

import random

import hypothesis
import numpy
import pytest
import torch

FOUND: list[tuple[float, ...]] = []


@pytest.mark.parametrize("turn", range(2))
def test_every_test_draws_the_same(turn: int) -> None:
    FOUND.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
    assert FOUND[-1] == FOUND[0]


def test_no_example_is_asked_to_be_fast() -> None:
    """Also where a test sets something else."""
    for settings in (hypothesis.settings(), hypothesis.settings(max_examples=3)):
        assert settings.deadline is None and hypothesis.HealthCheck.too_slow in settings.suppress_health_check
