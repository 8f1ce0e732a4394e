"""AdamW and Muon against torch's own, and what they refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from intarsia.comm import FakeCommunicator, SelfCommunicator
from intarsia.contracts import Init, OptimizerGroup, Placement
from intarsia.errors import UsageError
from intarsia.layout import Layout, build_layouts
from intarsia.parameters import ParameterInfo, ParameterTable
from intarsia.plugins import current
from intarsia_optimizers import adamw, muon
from intarsia_optimizers.config import AdamWConfig, MuonConfig
from torch import nn

SHAPES = {"tok_embeddings.weight": (9, 4), "layers.0.wq.weight": (4, 6), "layers.0.norm.weight": (6,), "output.weight": (9, 4)}


def table_of(layouts: dict[str, Layout] | None = None) -> ParameterTable:
    table = ParameterTable()
    for name, shape in SHAPES.items():
        layout = (layouts or {}).get(name, Layout.whole(shape, "float32"))
        table.add(ParameterInfo(name, shape, "float32", Init("zeros"), layout=layout))
    return table


def pair() -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    torch.manual_seed(0)
    first = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    return first, {name: copy.deepcopy(value) for name, value in first.items()}


def train(ours: Any, mine: dict[str, nn.Parameter], theirs: list[torch.optim.Optimizer], other: dict[str, nn.Parameter]) -> None:
    for step in range(5):
        for name in mine:
            mine[name].grad = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(step))
            other[name].grad = mine[name].grad.clone()
        ours.step(1.0)
        for optimizer in theirs:
            optimizer.step()


def test_adamw_is_torchs_with_decay_for_matrices_only() -> None:
    mine, other = pair()
    config = AdamWConfig(lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))
    ours = adamw.build(config, [OptimizerGroup("default", mine)], table_of(), SelfCommunicator())
    matrices = [value for value in other.values() if value.ndim == 2]
    vectors = [value for value in other.values() if value.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    train(ours, mine, [torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), fused=True)], other)
    for name in mine:
        assert torch.equal(mine[name], other[name]), name


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_for_matrices_and_adamw_for_the_rest(adjust: str, nesterov: bool) -> None:
    mine, other = pair()
    config = MuonConfig(lr=0.02, weight_decay=0.05, adjust=adjust, nesterov=nesterov, adamw_lr=0.01, adamw_weight_decay=0.03)
    ours = muon.build(config, [OptimizerGroup("default", mine)], table_of(), SelfCommunicator())
    # torch keeps the sum of gradients where we keep the mean: Newton-Schulz divides by the norm, so that the update is the same.
    rest = [value for name, value in other.items() if name != "layers.0.wq.weight"]
    theirs = [
        torch.optim.Muon([other["layers.0.wq.weight"]], lr=0.02, weight_decay=0.05, nesterov=nesterov, adjust_lr_fn=adjust),
        torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.03),
    ]
    train(ours, mine, theirs, other)
    for name in mine:
        # bfloat16 iterations round differently where their input differs in the last bit.
        tolerance = 4e-3 if name == "layers.0.wq.weight" else 1e-6
        assert torch.allclose(mine[name], other[name], atol=tolerance), name
    assert set(ours.slots()["layers.0.wq.weight"]) == {"momentum"} and set(ours.slots()["output.weight"]) == {
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    assert ours.learning_rates() == {"default": 0.02, "default.adamw": 0.01}


def test_newton_schulz_gives_a_nearly_orthogonal_matrix() -> None:
    matrix = torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(muon.newton_schulz(matrix, 5, 1e-7, torch.float32))
    assert values.min() > 0.5 and values.max() < 1.3


def placement(name: str) -> Placement:
    plugins = current()
    return plugins.build(plugins.config_class(plugins.registry("placement").find(name))())


@pytest.mark.parametrize("rank", [0, 1])
def test_muon_refuses_a_matrix_that_is_cut_and_takes_one_that_is_whole_somewhere(rank: int) -> None:
    from intarsia.contracts import Member
    from intarsia.mesh import Mesh

    members = [Member(name, shape) for name, shape in SHAPES.items()]

    def build(by: str) -> Any:
        layouts = build_layouts(members, [("dp_shard", 2, placement(by))])
        table = table_of(layouts)
        comm = FakeCommunicator(rank=rank, size=2)
        table.mesh = Mesh({"dp_shard": 2}, comm)
        parameters = {name: nn.Parameter(torch.ones(layouts[name].numel(rank))) for name in SHAPES}
        made = muon.build(MuonConfig(), [OptimizerGroup("default", parameters)], table, comm)
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        made.step(1.0)
        return made

    with pytest.raises(UsageError, match=r"'layers.0.wq.weight' \(shape \[4, 6\]\): rank . holds a part of it, 12 of 24"):
        build("row")
    build("owned")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda g, t: adamw.build(AdamWConfig(lr=-1.0), g, t, SelfCommunicator()), "optimizer.lr is -1"),
        (lambda g, t: adamw.build(AdamWConfig(betas=(0.9, 1.0)), g, t, SelfCommunicator()), "optimizer.betas is 1"),
        (lambda g, t: adamw.build(AdamWConfig(implementation="fast"), g, t, SelfCommunicator()), "implementation 'fast'"),
        (lambda g, t: muon.build(MuonConfig(momentum=1.0), g, t, SelfCommunicator()), "optimizer.momentum is 1"),
        (lambda g, t: muon.build(MuonConfig(adjust="orignal"), g, t, SelfCommunicator()), "'original'"),
        (lambda g, t: muon.build(MuonConfig(newton_schulz_dtype="float8"), g, t, SelfCommunicator()), "newton_schulz_dtype"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, text: str) -> None:
    mine, _ = pair()
    with pytest.raises(UsageError, match=text):
        make([OptimizerGroup("default", mine)], table_of())


def test_no_dynamo_is_imported_by_an_optimizer_step() -> None:
    """torch's Optimizer class would import torch._dynamo, which takes seconds at every start."""
    import subprocess
    import sys

    code = (
        "import sys, torch\nfrom intarsia_optimizers import adamw, muon\nfrom intarsia_optimizers.config import *\n"
        "from intarsia.comm import SelfCommunicator\nfrom intarsia.contracts import *\nfrom intarsia.layout import Layout\n"
        "from intarsia.parameters import *\ntable = ParameterTable()\n"
        "table.add(ParameterInfo('w', (3, 3), 'float32', Init('zeros'), layout=Layout.whole((3, 3), 'float32')))\n"
        "p = torch.nn.Parameter(torch.ones(3, 3)); p.grad = torch.ones(3, 3)\n"
        "for build, config in ((adamw.build, AdamWConfig()), (muon.build, MuonConfig())):\n"
        "    build(config, [OptimizerGroup('g', {'w': p})], table, SelfCommunicator()).step(1.0)\n"
        "assert 'torch._dynamo' not in sys.modules and 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
