"""Muon in one process: torch's numbers, batches, stacks and splits, cut matrices on a pretended second rank, and what it refuses."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import chz
import pytest
import torch
from intarsia.comm import FakeCommunicator, SelfCommunicator
from intarsia.contracts import Box, OptimizerGroup
from intarsia.errors import CheckpointError, PluginError, UsageError
from intarsia.layout import Layout
from intarsia.mesh import Mesh
from intarsia.train.state import OptimizerState
from intarsia_optimizers import muon, muon_update
from intarsia_optimizers.config import MuonConfig, SplitConfig
from intarsia_optimizers.matrices import matrices_of
from intarsia_optimizers.updates import newton_schulz
from intarsia_testing.doubles import MemoryStorage
from intarsia_testing.stateful import OverStorage
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from _shards import SHAPES, Shards, layouts_of, placement, values

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EXACT = MuonConfig(newton_schulz_dtype="float32", lr=0.02, weight_decay=0.05)
MATRICES = [name for name in SHAPES if "embedding" not in name and "norm" not in name]


def built(config: MuonConfig, shards: Shards, comm: Any = None, groups: list[OptimizerGroup] | None = None) -> muon.Muon:
    return muon.build(config, groups or [OptimizerGroup("default", shards.parameters)], shards.table, comm or SelfCommunicator())


def run(config: MuonConfig, shards: Shards, steps: int = 3, factor: Any = 1.0) -> muon.Muon:
    optimizer = built(config, shards)
    for step in range(steps):
        shards.differentiate(step)
        optimizer.step(factor)
    return optimizer


def close(first: Shards, second: Shards, atol: float = 1e-5) -> None:
    for (name, one), other in zip(first.masters().items(), second.masters().values(), strict=True):
        assert torch.allclose(one.flatten(), other.flatten(), rtol=1e-5, atol=atol), name


# ---------------------------------------------------------------- torch's numbers


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest(adjust: str, nesterov: bool) -> None:
    config = MuonConfig(lr=2e-3, weight_decay=0.05, adjust=adjust, nesterov=nesterov, adamw_lr=0.01, adamw_weight_decay=0.03)
    shapes = {name: shape for name, shape in SHAPES.items() if len(shape) < 3}
    shards = Shards(shapes=shapes)
    copies = {name: nn.Parameter(value.detach().clone().view(shapes[name])) for name, value in shards.parameters.items()}
    theirs: list[torch.optim.Optimizer] = [
        torch.optim.Muon([copies[n] for n in copies if n in MATRICES], lr=2e-3, weight_decay=0.05, nesterov=nesterov, adjust_lr_fn=adjust),
        torch.optim.AdamW([copies[n] for n in copies if n not in MATRICES], lr=0.01, betas=(0.9, 0.95), weight_decay=0.03),
    ]
    ours = built(config, shards)
    for step in range(3):
        shards.differentiate(step)
        for name, copy in copies.items():
            copy.grad = shards.parameters[name].grad.clone().view(shapes[name])  # type: ignore[union-attr]
        ours.step(1.0)
        for optimizer in theirs:
            optimizer.step()
    for name, copy in copies.items():
        assert torch.allclose(shards.parameters[name].view(shapes[name]), copy, atol=2e-4, rtol=3e-4), name
    for name in copies:
        if name in MATRICES:
            mine, momentum = ours.slots()[name]["momentum"].view(shapes[name]), theirs[0].state[copies[name]]["momentum_buffer"]
            assert torch.allclose(mine, momentum, atol=3e-6, rtol=5e-4), name
    assert set(ours.slots()["layers.0.wo.weight"]) == {"momentum"}
    assert set(ours.slots()["embedding.weight"]) == {"exp_avg", "exp_avg_sq", "step"}
    assert ours.learning_rates() == {"default": 2e-3, "default.adamw": 0.01}


@pytest.mark.parametrize("shape", [(16, 16), (64, 16), (16, 64), (100, 130)])
def test_newton_schulz_is_no_farther_from_float64_than_torchs(shape: tuple[int, int]) -> None:
    ours = theirs = 0.0
    batch_BMN = torch.randn(40, *shape, generator=torch.Generator().manual_seed(1))
    exact_BMN = newton_schulz(batch_BMN.double(), 5, COEFFICIENTS, 1e-7, torch.float64)
    mine_BMN = newton_schulz(batch_BMN.bfloat16(), 5, COEFFICIENTS, 1e-7, torch.bfloat16)
    for matrix_MN, mine_MN, exact_MN in zip(batch_BMN, mine_BMN, exact_BMN, strict=True):
        torchs_MN = _zeropower_via_newtonschulz(matrix_MN.clone(), COEFFICIENTS, 5, 1e-7)
        ours += float((mine_MN - exact_MN).norm() / exact_MN.norm())
        theirs += float((torchs_MN - exact_MN).norm() / exact_MN.norm())
    assert ours <= theirs, (ours / 40, theirs / 40)


def test_newton_schulz_gives_nearly_orthogonal_matrices_and_zero_for_zero() -> None:
    batch_BMN = torch.randn(3, 12, 7, generator=torch.Generator().manual_seed(1))
    kept = batch_BMN.clone()
    found = torch.linalg.svdvals(newton_schulz(batch_BMN, 5, COEFFICIENTS, 1e-7, torch.float32))
    assert found.min() > 0.5 and found.max() < 1.3 and torch.equal(batch_BMN, kept)
    assert not newton_schulz(torch.zeros(1, 3, 4), 5, COEFFICIENTS, 1e-7, torch.bfloat16).any()


def test_shape_factors() -> None:
    def factor(adjust: str, rows: int, columns: int) -> float:
        return muon_update.Update(1.0, 0.0, 0.9, True, adjust).shape_factor(rows, columns)

    assert (factor("original", 8, 2), factor("original", 2, 8)) == (2.0, 1.0)
    assert factor("match_rms_adamw", 16, 4) == factor("match_rms_adamw", 4, 16) == pytest.approx(0.8)
    assert (factor("spectral", 8, 2), factor("spectral", 2, 8), factor("none", 8, 2)) == (2.0, 0.5, 1.0)


def test_coefficients_and_steps_are_those_of_the_settings() -> None:
    config = MuonConfig(newton_schulz_dtype="float32", newton_schulz_steps=12, coefficients=(1.5, -0.5, 0.0), weight_decay=0.0, lr=1.0)
    shards = Shards()
    before = shards.parameters["layers.0.wo.weight"].detach().clone().view(8, 4)
    run(chz.replace(config, adjust="none"), shards, 1)
    moved = before - shards.parameters["layers.0.wo.weight"].detach().view(8, 4)
    u, _, v = torch.linalg.svd(values(1000)["layers.0.wo.weight"], full_matrices=False)
    # The cubic converges: what is left is the orthogonal factor of the gradient itself.
    assert torch.allclose(moved, u @ v, atol=1e-3)


# ---------------------------------------------------------------- batches, stacks, splits


def batches(config: MuonConfig, shards: Shards) -> list[tuple[int, ...]]:
    optimizer, seen = built(config, shards), []
    inner = optimizer._newton_schulz
    optimizer._newton_schulz = lambda batch_BMN, *rest: seen.append(tuple(batch_BMN.shape)) or inner(batch_BMN, *rest)
    shards.differentiate(0)
    optimizer.step(1.0)
    return sorted(seen)


def test_equal_shapes_are_one_batch_up_to_a_bound() -> None:
    assert batches(EXACT, Shards()) == [(1, 16, 8), (2, 8, 4), (2, 12, 8), (5, 6, 8)]
    # 100 elements: two of 6 x 8, one of 12 x 8, three of 8 x 4; a larger matrix goes alone.
    assert batches(chz.replace(EXACT, batch_elements=100), Shards()) == [
        (1, 6, 8), (1, 12, 8), (1, 12, 8), (1, 16, 8), (2, 6, 8), (2, 6, 8), (2, 8, 4),
    ]  # fmt: skip
    one, many = Shards(), Shards()
    run(EXACT, one)
    run(chz.replace(EXACT, batch_elements=1), many)
    close(one, many, 2e-6)


def separate(shards: Shards, parts: dict[str, list[tuple[str, Box]]]) -> Shards:
    """The same start and gradients with the parameters of `parts` as several two-dimensional ones."""
    shapes, pieces = {}, {}
    for name, shape in SHAPES.items():
        for part, box in parts.get(name, [(name, Box.whole(shape))]):
            shapes[part], pieces[part] = (
                box.size[-2:] if name in parts else shape,
                (name, tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))),
            )

    def cut(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {part: whole[name][index].reshape(shapes[part]) for part, (name, index) in pieces.items()}

    made = Shards(shapes=shapes, start=cut(values(0)))
    made.differentiate = lambda step, without=(): [  # type: ignore[method-assign]
        setattr(made.parameters[part], "grad", gradient.reshape(-1).clone()) for part, gradient in cut(values(1000 + step)).items()
    ]
    made.pieces = pieces  # type: ignore[attr-defined]
    return made


SPLITS = {
    "blocks": (SplitConfig(match=("*.wqkv.weight",), blocks=3), [(0, 4), (4, 4), (8, 4)], False),
    "heads": (SplitConfig(match=("*.wqkv.weight",), head_dim=2), [(i, 2) for i in range(0, 12, 2)], False),
    "sizes": (SplitConfig(match=("*.wqkv.weight",), sizes=(6, 3, 3)), [(0, 6), (6, 3), (9, 3)], False),
    "columns": (SplitConfig(match=("*.wqkv.weight",), head_dim=4, columns=True), [(0, 4), (4, 4)], True),
}


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", "spectral"])
@pytest.mark.parametrize("kind", list(SPLITS))
def test_a_split_parameter_is_its_parts(kind: str, adjust: str) -> None:
    split, places, columns = SPLITS[kind]
    parts = {
        f"layers.{layer}.wqkv.weight": [
            (f"layers.{layer}.part{at}.weight", Box((0, at), (12, length)) if columns else Box((at, 0), (length, 8)))
            for at, length in places
        ]
        for layer in (0, 1)
    }
    fused = Shards()
    apart = separate(fused, parts)
    run(chz.replace(EXACT, split=(split,), adjust=adjust), fused)
    run(chz.replace(EXACT, adjust=adjust), apart)
    for part, (name, index) in apart.pieces.items():  # type: ignore[attr-defined]
        whole = fused.parameters[name].detach().view(SHAPES[name])[index]
        assert torch.allclose(whole.flatten(), apart.parameters[part].detach().flatten(), atol=2e-6), (name, part)


def test_a_stack_of_experts_is_its_experts() -> None:
    stacked = Shards()
    name = "layers.1.experts.weight"
    apart = separate(stacked, {name: [(f"layers.1.expert{e}.weight", Box((e, 0, 0), (1, 6, 8))) for e in range(5)]})
    run(EXACT, stacked)
    run(EXACT, apart)
    for part, (whole, index) in apart.pieces.items():  # type: ignore[attr-defined]
        expected = stacked.parameters[whole].detach().view(SHAPES[whole])[index]
        assert torch.allclose(expected.flatten(), apart.parameters[part].detach().flatten(), atol=2e-6), part


# ---------------------------------------------------------------- state, factor, masters


def test_split_masters_narrow_momentum_and_a_factor_on_the_device() -> None:
    plain, halves, narrow, tensor = Shards(), Shards(split=True), Shards(), Shards()
    run(EXACT, plain)
    run(EXACT, halves)
    optimizer = run(chz.replace(EXACT, state_dtype="bfloat16"), narrow)
    run(EXACT, tensor, factor=torch.ones(()))
    close(plain, halves, 3e-5)
    close(plain, tensor, 1e-6)
    close(plain, narrow, 0.02)
    assert optimizer.slots()["layers.0.wo.weight"]["momentum"].dtype == torch.bfloat16
    assert optimizer.slots()["embedding.weight"]["exp_avg"].dtype == torch.bfloat16 and optimizer.updates_split_masters


def test_disjoint_names_that_cover_all_are_one_step() -> None:
    whole, parted, names = Shards(), Shards(), list(SHAPES)
    run(EXACT, whole)
    optimizer = built(EXACT, parted)
    for step in range(3):
        parted.differentiate(step)
        for part in (names[3:], names[:3]):
            optimizer.step(1.0, part)
    close(whole, parted, 2e-6)


def test_a_step_reads_no_value_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards()
    optimizer = run(EXACT, shards, 1)

    def read(*arguments: Any) -> Any:
        raise AssertionError("a step reads a tensor's value")

    for method in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, method, read)
    shards.differentiate(1)
    optimizer.step(torch.full((), 0.5))


# ---------------------------------------------------------------- who works on what


def pretend(by: Any, rank: int, config: MuonConfig = EXACT, size: int = 2) -> tuple[muon.Muon, FakeCommunicator, Shards]:
    comm = FakeCommunicator(rank, size)
    mesh = Mesh({"dp_shard": size}, comm)
    shards = Shards(layouts_of([("dp_shard", size, by)]), mesh)
    return built(config, shards, comm), comm, shards


@pytest.mark.parametrize("rank", [0, 1])
def test_whole_matrices_need_no_collective(rank: int) -> None:
    for by in (placement("owned"), placement("block", tile=(-1, -1))):
        optimizer, comm, shards = pretend(by, rank)
        shards.differentiate(0)
        optimizer.step(1.0)
        assert not comm.stats() and optimizer.facts()["cut"] == 0
    loads = optimizer.facts()["loads"]["dp_shard"]
    assert len(loads) == 2 and min(loads) > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_cut_matrices_travel_in_two_exchanges_that_are_counted_and_told(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "intarsia.optimizers"):
        optimizer, comm, shards = pretend(placement("row"), rank)
    shards.differentiate(0)
    optimizer.step(1.0)
    facts, stats = optimizer.facts(), comm.stats()
    # Experts are cut between matrices: three here, two there.
    assert facts["cut_parameters"] == [name for name in MATRICES if "experts" not in name] and facts["matrices"] == len(MATRICES)
    assert {name: each.calls for name, each in stats.items()} == {"Muon: matrices to their owners": 1, "Muon: updates to their parts": 1}
    assert sum(each.bytes for each in stats.values()) == facts["transfer_bytes"] > 0
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (rank == 0) and (rank or ("5 of 6 parameters" in told[0] and f"{facts['transfer_bytes']} bytes" in told[0]))


def test_owners_balance_time_and_memory() -> None:
    from intarsia_optimizers.ownership import find_ownership

    shapes = {f"m{i}": (64, 64) for i in range(7)} | {"big": (64, 512), "small": (8, 8)}
    layouts = {
        name: Layout.whole(shape).cut("tp", [(Box((r * shape[0] // 4, 0), (shape[0] // 4, shape[1])),) for r in range(4)])
        for name, shape in shapes.items()
    }
    found = find_ownership(layouts, {n: matrices_of(n, s, None) for n, s in shapes.items()}, 5)
    loads = found.loads[(("tp", 4),)]
    assert set(found.journeys) == set(shapes) and sum(len(j.owned.local(r)) for j in found.journeys.values() for r in range(4)) == 9
    # The one large matrix goes alone but for the smallest; seven equal ones over the three others.
    assert sorted(load / loads[0] for load in loads)[0] > 0.1 and max(loads) < 0.6 * sum(loads)
    assert all(sum(j.owned.numel(r) for r in range(4)) == math.prod(shapes[n]) for n, j in found.journeys.items())


def test_matrices_cut_by_tensor_parallelism_have_owners_over_both_axes() -> None:
    """The outer cut is named in the layout; a rank of the group is numbered as the mesh numbers it, whatever the order of the cuts."""
    from intarsia_optimizers.ownership import cut_axes

    layouts = layouts_of([("tp", 2, placement("row")), ("dp_shard", 2, placement("owned"))])
    ordered = cut_axes("x", layouts["layers.0.up.weight"])
    assert ordered.axes == (("dp_shard", 2), ("tp", 2))
    for tp in range(2):
        for shard in range(2):
            assert ordered.local(shard * 2 + tp) == layouts["layers.0.up.weight"].local(tp * 2 + shard)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"lr": -1.0}, "optimizer.lr is -1"),
        ({"momentum": 1.0}, "optimizer.momentum is 1"),
        ({"adjust": "orignal"}, "'original'"),
        ({"newton_schulz_dtype": "float8"}, "newton_schulz_dtype 'float8' is unknown"),
        ({"newton_schulz_kernel": "gramm"}, "newton_schulz_kernel 'gramm' is unknown: no installed kernel for newton_schulz"),
        ({"newton_schulz_steps": 0}, "newton_schulz_steps is 0"),
        ({"batch_elements": 0}, "batch_elements is 0"),
        ({"adamw_eps": -1.0}, "adamw_eps is -1"),
        ({"state_dtype": "float16"}, "state_dtype 'float16' is unknown"),
        ({"split": (SplitConfig(match=("*.wqkv.weight",)),)}, r"optimizer.split.0 \(\*.wqkv.weight\) sets none of"),
        ({"split": (SplitConfig(match=("*.wqkv.weight",), blocks=3, head_dim=4),)}, "sets blocks and head_dim of .*exactly one"),
        ({"split": (SplitConfig(match=("*.wkv.weight",), blocks=2),)}, r"matches '\*.wkv.weight', but no matrix.*wqkv"),
        ({"split": (SplitConfig(match=("*.wqkv.weight",), blocks=-3),)}, "must be positive"),
        ({"split": (SplitConfig(match=("*.wqkv.weight",), blocks=5),)}, r"'layers.0.wqkv.weight' \(shape \[12, 8\]\) into 5 equal blocks, but its 12 rows"),
        ({"split": (SplitConfig(match=("*.wqkv.weight",), head_dim=3, columns=True),)}, "into heads of 3 columns, but its 8 columns"),
        ({"split": (SplitConfig(match=("*.wqkv.weight",), sizes=(8, 2)),)}, "blocks of 8, 2 rows, together 10, but it has 12"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        built(MuonConfig(**fields), Shards())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "Parameter group 'odd': lr is -1"),
        ({"ns_steps": 3}, "Parameter group 'odd' sets 'ns_steps', which is no field of MuonConfig"),
        ({"coefficients": (1.0, 1.0, 1.0)}, "Parameter group 'odd' sets 'coefficients', which holds for all groups"),
    ],
)
def test_options_of_a_group_that_cannot_be_are_refused(options: dict[str, Any], text: str) -> None:
    shards = Shards()
    with pytest.raises(UsageError, match=text):
        built(MuonConfig(), shards, groups=[OptimizerGroup("odd", shards.parameters, options)])


def test_layouts_that_cannot_be_are_told_by_name() -> None:
    shards = Shards()
    shards.table["layers.0.wo.weight"].layout = Layout.whole((8, 4)).partial("tp", 1, "sum")
    with pytest.raises(PluginError, match=r"Parameter 'layers.0.wo.weight' has a pending reduction along 'tp'"):
        built(MuonConfig(), shards)
    cut = Shards(layouts_of([("dp_shard", 2, placement("row"))]), Mesh({"dp_shard": 2}, FakeCommunicator(0, 2)))
    cut.table.mesh = None
    for info in cut.table.values():
        info.layout = layouts_of([("dp_shard", 1, placement("row"))])[info.name]
    with pytest.raises(PluginError, match=r"has \d+ elements, but its layout gives"):
        built(MuonConfig(), cut)


def test_no_dynamo_is_imported_by_an_optimizer_step() -> None:
    """torch's Optimizer class would import torch._dynamo, which takes seconds at every start."""
    code = (
        "import sys, torch\nfrom intarsia_optimizers import adamw, lion, muon, sgd\nfrom intarsia_optimizers.config import *\n"
        "from intarsia.comm import SelfCommunicator\nfrom intarsia.contracts import *\nfrom intarsia.layout import Layout\n"
        "from intarsia.parameters import *\ntable = ParameterTable()\n"
        "table.add(ParameterInfo('w', (3, 3), 'float32', Init('zeros'), layout=Layout.whole((3, 3), 'float32')))\n"
        "p = torch.nn.Parameter(torch.ones(3, 3)); p.grad = torch.ones(3, 3)\n"
        "for module, config in ((adamw, AdamWConfig()), (adamw, AdamConfig()), (muon, MuonConfig()), (lion, LionConfig()), (sgd, SGDConfig())):\n"
        "    module.build(config, [OptimizerGroup('g', {'w': p})], table, SelfCommunicator()).step(1.0)\n"
        "assert 'torch._dynamo' not in sys.modules and 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_a_checkpoint_that_does_not_fit_changes_nothing() -> None:
    """Momentum of another shape and of another name are told by name before anything is written."""
    saved, storage = Shards(), MemoryStorage()
    optimizer = run(EXACT, saved, 1)
    manager = OverStorage(storage)
    manager.save(1, [OptimizerState(optimizer, saved.table)])
    manager.wait()
    manager.close()
    wrong = {name: (4, 8) if name == "layers.0.wo.weight" else shape for name, shape in SHAPES.items()}
    renamed = {name.replace("0.up", "0.gate"): shape for name, shape in SHAPES.items()}
    for shapes, text in ((wrong, "layers.0.wo.weight/momentum"), (renamed, "layers.0.gate.weight/momentum")):
        shards = Shards(shapes=shapes)
        other = run(EXACT, shards, 1)
        before = {name: {slot: tensor.clone() for slot, tensor in slots.items()} for name, slots in other.slots().items()}
        loader = OverStorage(storage)
        ref = loader.latest()
        assert ref is not None
        with pytest.raises(CheckpointError, match=text):
            loader.load(ref, [OptimizerState(other, shards.table)])
        for name, slots in other.slots().items():
            assert all(torch.equal(tensor, before[name][slot]) for slot, tensor in slots.items()), name


def test_built_on_the_meta_device_for_plans() -> None:
    shards = Shards()
    for name, parameter in shards.parameters.items():
        shards.parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"))
    slots = built(MuonConfig(state_dtype="bfloat16"), shards, SelfCommunicator("meta")).slots()
    assert {tensor.dtype for held in slots.values() for tensor in held.values() if tensor.ndim} == {torch.bfloat16}
