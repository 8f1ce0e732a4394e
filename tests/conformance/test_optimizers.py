"""Our own optimizers keep the promises of the contract."""

from __future__ import annotations

from intarsia_optimizers.config import AdamConfig, AdamWConfig, LionConfig, MuonConfig, SGDConfig
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


class TestMuonBatches(OptimizerConformance):
    entry = "intarsia-optimizers:muon"
    config = MuonConfig(batch_elements=30, state_dtype="bfloat16", adjust="spectral")


class TestAdamWNarrow(OptimizerConformance):
    entry = "intarsia-optimizers:adamw"
    config = AdamWConfig(state_dtype="bfloat16")


class TestAdam(OptimizerConformance):
    entry = "intarsia-optimizers:adam"
    config = AdamConfig(lr=1e-3)


class TestLion(OptimizerConformance):
    entry = "intarsia-optimizers:lion"
    config = LionConfig(lr=1e-3)


class TestSGD(OptimizerConformance):
    entry = "intarsia-optimizers:sgd"
    config = SGDConfig(lr=0.01, nesterov=True)


class TestSGDPlain(OptimizerConformance):
    entry = "intarsia-optimizers:sgd"
    config = SGDConfig(lr=0.01, momentum=0.0)
