"""The family keeps the promises of model families."""

from __future__ import annotations

from acme_parallel.config import ParallelConfig, parallel
from intarsia_testing import ModelConformance


class TestParallel(ModelConformance):
    entry = "acme-parallel:parallel"

    def config(self) -> ParallelConfig:
        return parallel(dim=24, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=40, vocab_size=96, max_positions=64)
