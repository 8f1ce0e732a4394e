"""The family keeps the promises of model families."""

from __future__ import annotations

from acme_recurrence.config import ToyRecurrenceConfig, toy
from intarsia_testing import ModelConformance


class TestToyRecurrence(ModelConformance):
    entry = "acme-recurrence:toy_recurrence"

    def config(self) -> ToyRecurrenceConfig:
        return toy(dim=24, layers=3, heads=4, head_dim=6, hidden=40, vocab_size=96, max_positions=64)
