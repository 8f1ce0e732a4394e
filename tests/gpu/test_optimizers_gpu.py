"""Optimizers on a GPU: torch's numbers, kernels, steps that read nothing and can be captured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia.comm import SelfCommunicator
from intarsia.contracts import OptimizerGroup
from intarsia.plugins import current
from intarsia_optimizers.config import AdamConfig, AdamWConfig, LionConfig, MuonConfig, SGDConfig
from intarsia_optimizers.updates import newton_schulz
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from _shards import Shards

pytestmark = pytest.mark.gpu

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.weight": (1000, 256),
    "layers.0.wq.weight": (256, 256),
    "layers.1.wq.weight": (256, 256),
    "layers.0.up.weight": (700, 256),
    "layers.0.down.weight": (256, 700),
    "layers.0.experts.weight": (3, 256, 320),
    "layers.0.norm.weight": (256,),
}
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ALL = [
    AdamWConfig(lr=0.01),
    AdamConfig(lr=0.01),
    AdamWConfig(lr=0.01, state_dtype="bfloat16"),
    LionConfig(lr=0.01),
    SGDConfig(lr=0.01, nesterov=True),
    MuonConfig(lr=2e-3),
]
IDS = ["adamw", "adam", "narrow", "lion", "sgd", "muon"]


def shards(**options: Any) -> Shards:
    return Shards(shapes=SHAPES, device="cuda", **options)


def built(config: Any, made: Shards) -> Any:
    return current().build(config, [OptimizerGroup("default", made.parameters)], made.table, SelfCommunicator("cuda"))


def run(config: Any, made: Shards, steps: int = 3, factor: Any = 1.0) -> Any:
    optimizer = built(config, made)
    for step in range(steps):
        made.differentiate(step)
        optimizer.step(factor)
    return optimizer


def test_adamw_over_a_flat_run_has_the_bits_of_torchs_fused_adamw() -> None:
    made = shards()
    copies = {name: nn.Parameter(value.detach().clone()) for name, value in made.parameters.items()}
    decayed = [copies[name] for name, shape in SHAPES.items() if len(shape) > 1]
    plain = [copies[name] for name, shape in SHAPES.items() if len(shape) == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    theirs, ours = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True), built(AdamWConfig(lr=0.01), made)
    for step in range(4):
        made.differentiate(step)
        for name, copy in copies.items():
            copy.grad = made.parameters[name].grad.clone()  # type: ignore[union-attr]
        ours.step(1.0)
        theirs.step()
    assert all(torch.equal(made.parameters[name], copy) for name, copy in copies.items())
    assert ours.slots()["embedding.weight"]["step"].is_cuda


def test_muon_is_torchs() -> None:
    made = shards()
    names = [name for name, shape in SHAPES.items() if len(shape) == 2 and "embedding" not in name]
    copies = {name: nn.Parameter(made.parameters[name].detach().clone().view(SHAPES[name])) for name in names}
    theirs, ours = torch.optim.Muon(list(copies.values()), lr=2e-3, weight_decay=0.1), built(MuonConfig(lr=2e-3), made)
    for step in range(3):
        made.differentiate(step)
        for name, copy in copies.items():
            copy.grad = made.parameters[name].grad.clone().view(SHAPES[name])  # type: ignore[union-attr]
        ours.step(1.0)
        theirs.step()
    for name, copy in copies.items():
        assert torch.allclose(made.parameters[name].view(SHAPES[name]), copy, atol=2e-4, rtol=3e-4), name


@pytest.mark.parametrize("shape", [(256, 256), (256, 1024), (1024, 256), (300, 700)])
def test_the_chosen_newton_schulz_is_no_farther_from_float64_than_torchs(shape: tuple[int, int]) -> None:
    chosen = built(MuonConfig(), shards())._newton_schulz
    generator = torch.Generator("cuda").manual_seed(3)
    batch_BMN = torch.randn(8, *shape, device="cuda", generator=generator)
    # Half of them with a spectrum that falls by four orders of magnitude.
    u, s, v = torch.linalg.svd(batch_BMN[4:], full_matrices=False)
    batch_BMN[4:] = (u * torch.logspace(0, -4, s.shape[-1], device="cuda")) @ v
    exact_BMN = newton_schulz(batch_BMN.double(), 5, COEFFICIENTS, 1e-7, torch.float64)
    mine_BMN = chosen(batch_BMN.bfloat16(), 5, COEFFICIENTS, 1e-7, torch.bfloat16)
    for half in (slice(0, 4), slice(4, 8)):
        ours = theirs = 0.0
        for matrix_MN, mine_MN, exact_MN in zip(batch_BMN[half], mine_BMN[half], exact_BMN[half], strict=True):
            torchs_MN = _zeropower_via_newtonschulz(matrix_MN.clone(), COEFFICIENTS, 5, 1e-7)
            ours += float((mine_MN - exact_MN).norm() / exact_MN.norm())
            theirs += float((torchs_MN - exact_MN).norm() / exact_MN.norm())
        assert ours <= theirs, (ours / 4, theirs / 4)


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_split_masters_are_updated_as_float32(config: Any) -> None:
    whole, halves = shards(), shards(split=True)
    run(config, whole)
    run(config, halves)
    for (name, one), other in zip(whole.masters().items(), halves.masters().values(), strict=True):
        if isinstance(config, LionConfig):  # the last bit may turn a sign
            assert float((one - other).abs().gt(1e-4).float().mean()) < 1e-4, name
            continue
        assert torch.allclose(one, other, rtol=3e-6, atol=2e-4 if isinstance(config, MuonConfig) else 2e-6), name


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_a_step_waits_for_nothing_and_is_captured(config: Any, split: bool) -> None:
    eager, captured = shards(split=split), shards(split=split)
    first, second = built(config, eager), built(config, captured)
    factor = torch.ones((), device="cuda")
    for step in range(2):  # warm-up: autotuning, plans
        for made, optimizer in ((eager, first), (captured, second)):
            made.differentiate(step)
            optimizer.step(factor)
    torch.cuda.synchronize()
    for made in (eager, captured):
        made.differentiate(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        first.step(factor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, buffers = torch.cuda.CUDAGraph(), [captured.high, captured.low] if split else [captured.buffer]
    kept = [buffer.clone() for buffer in buffers]
    with torch.cuda.graph(graph):
        second.step(factor)
    assert all(torch.equal(a, b) for a, b in zip(kept, buffers, strict=True))  # recorded, not run
    graph.replay()
    factor.fill_(0.5)
    first.step(factor)
    graph.replay()
    for (name, one), other in zip(eager.masters().items(), captured.masters().values(), strict=True):
        assert torch.equal(one, other), name
    for name, slots in first.slots().items():
        assert all(torch.equal(tensor, second.slots()[name][slot]) for slot, tensor in slots.items()), name
