"""Our own optimizers keep the promises of the contract."""

from __future__ import annotations

from intarsia_optimizers.config import AdamWConfig, MuonConfig
from intarsia_testing.optimizer import OptimizerConformance


class TestAdamW(OptimizerConformance):
    entry = "intarsia-optimizers:adamw"


class TestAdamWForeach(OptimizerConformance):
    entry = "intarsia-optimizers:adamw"
    config = AdamWConfig(implementation="foreach")


class TestMuon(OptimizerConformance):
    entry = "intarsia-optimizers:muon"


class TestMuonFloat32(OptimizerConformance):
    entry = "intarsia-optimizers:muon"
    config = MuonConfig(newton_schulz_dtype="float32", adjust="match_rms_adamw", nesterov=False)
