"""Every optimizer under every placement gives the parameters and the state of one process, and says with how many collectives."""

from __future__ import annotations

from typing import Any

import torch
from _spawn import spawn

# Has no gradient in the second of three steps.
SKIPPED = "layers.0.up.weight"

PLACEMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "row": ("row", {}),
    "column": ("column", {}),
    "flat": ("flat", {"unit": 1}),
    "owned": ("owned", {}),
    "block": ("block", {"tile": (4, 4)}),
    "matrices": ("block", {"tile": (-1, -1)}),
    "mixed": ("mixed", {}),
}


def made(kind: str) -> Any:
    from _shards import placement

    name, fields = PLACEMENTS[kind]
    if kind == "mixed":
        from intarsia_placements.config import MixedRule, Owned, Row

        rules = (MixedRule(match="*.wo.weight", placement=Owned()), MixedRule(match="*.wqkv.weight", placement=Row(dim=1)))
        fields = {"rules": rules, "default": Owned()}
    return placement(name, **fields)


def configs() -> dict[str, Any]:
    from intarsia_optimizers.config import AdamConfig, AdamWConfig, LionConfig, MuonConfig, SGDConfig, SplitConfig

    split = (SplitConfig(match=("layers.0.wqkv.weight",), sizes=(6, 3, 3)), SplitConfig(match=("layers.1.wqkv.weight",), head_dim=2))
    exact = {"lr": 0.02, "weight_decay": 0.05, "newton_schulz_dtype": "float32"}
    return {
        "adamw": AdamWConfig(lr=0.01),
        "adam": AdamConfig(lr=0.01, l2=0.05),
        "lion": LionConfig(lr=0.01),
        "sgd": SGDConfig(lr=0.01, nesterov=True),
        "narrow": AdamWConfig(lr=0.01, state_dtype="bfloat16"),
        "muon": MuonConfig(**exact),
        "muon split": MuonConfig(**exact, split=split, adjust="match_rms_adamw", batch_elements=100),
        "muon bfloat16": MuonConfig(lr=2e-3, state_dtype="bfloat16"),
    }


def train(config: Any, shards: Any, comm: Any) -> Any:
    from intarsia.contracts import OptimizerGroup
    from intarsia.plugins import current

    optimizer = current().target(current().entry_of(config))(config, [OptimizerGroup("default", shards.parameters)], shards.table, comm)
    for step in range(3):
        # As a scaler leaves it: what is unused is unused everywhere.
        shards.differentiate(step, [SKIPPED] if step == 1 else [])
        optimizer.step(1.0)
    return optimizer


def compare(world: Any, axes: list[Any], sizes: dict[str, int], only: list[str] | None = None) -> dict[str, Any]:
    """Under the layouts of `axes` ((axis, size, placement kind or "replicate"), outermost first): for each optimizer the greatest difference, its collectives, and how many there should be."""
    from _shards import Shards, layouts_of
    from intarsia.comm import SelfCommunicator
    from intarsia.mesh import Mesh
    from intarsia_testing.layout import pack

    mesh = Mesh(sizes, world)
    layouts = layouts_of([(axis, size, "replicate" if kind == "replicate" else made(kind)) for axis, size, kind in axes])
    found: dict[str, Any] = {}
    for number, (name, config) in enumerate(configs().items()):
        if only is not None and name not in only:
            continue
        one = Shards()
        reference = train(config, one, SelfCommunicator())
        part = Shards(layouts, mesh, flat=number % 2 == 0, split=name in ("muon", "adamw"))
        before = {id(group): sum(each.calls for each in group.stats().values()) for group in {world, *mesh._groups.values()}}
        optimizer = train(config, part, world)
        groups = {world, *mesh._groups.values()}
        calls = sum(sum(each.calls for each in group.stats().values()) - before.get(id(group), 0) for group in groups)
        worst = 0.0
        for parameter, value in part.masters().items():
            pairs = [(one.parameters[parameter].detach(), value)]
            slots = reference.slots()[parameter]
            assert slots.keys() == optimizer.slots()[parameter].keys()
            pairs += [(slots[slot], tensor) for slot, tensor in optimizer.slots()[parameter].items() if tensor.ndim]
            assert all(torch.equal(slots[slot], tensor) for slot, tensor in optimizer.slots()[parameter].items() if not tensor.ndim)
            for whole, local in pairs:
                expected = torch.zeros(local.numel())
                pack(whole.float().view(one.shapes[parameter]), part.regions[parameter], expected)
                worst = max(worst, float((expected - local.flatten().float()).abs().max()) if local.numel() else 0.0)
        cut = set(optimizer.facts()["cut_parameters"]) if "muon" in name else set()
        # Two exchanges in each of the steps in which something that is cut has a gradient.
        found[name] = [worst, calls, 2 * (len(cut) > 0) + 4 * (len(cut - {SKIPPED}) > 0) + 2 * (cut == {SKIPPED})]
    return found


def check(found: list[dict[str, Any]], whole: bool) -> None:
    for rank, results in enumerate(found):
        for name, (worst, calls, expected) in results.items():
            bound = 2e-4 if "bfloat16" in name else 2e-5
            assert worst <= bound, (rank, name, worst)
            # None where every matrix is whole somewhere; element by element nobody is spoken to.
            assert calls == expected and (not whole or calls == 0), (rank, name, calls, expected)
            assert calls > 0 or whole or "muon" not in name, (rank, name)


def test_one_axis() -> None:
    for rank_results in zip(*spawn(one_axis, 3), strict=True):
        check([result for _, result in rank_results], rank_results[0][0] in ("owned", "matrices"))


def one_axis(world: Any) -> list[Any]:
    return [[kind, compare(world, [("dp_shard", world.size, kind)], {"dp_shard": world.size})] for kind in PLACEMENTS]


def two_axes(world: Any) -> list[Any]:
    square = {"dp_shard": 2, "tp": 2}
    cases: list[tuple[list[Any], dict[str, int], bool]] = [
        ([("tp", 2, "row"), ("dp_shard", 2, "owned")], square, False),
        ([("tp", 2, "column"), ("dp_shard", 2, "flat")], square, False),
        ([("dp_replicate", 2, "replicate"), ("dp_shard", 2, "owned")], {"dp_replicate": 2, "dp_shard": 2}, True),
        ([("dp_shard", 2, "row"), ("dp_replicate", 2, "replicate")], {"dp_replicate": 2, "dp_shard": 2}, False),
        ([("ep", 2, "matrices"), ("ep_shard", 2, "owned")], {"dp_shard": 4, "ep": 2}, True),
        ([("ep", 2, "row"), ("ep_shard", 2, "row")], {"dp_shard": 4, "ep": 2}, False),
    ]
    return [[whole, compare(world, axes, sizes, ["adamw", "muon", "muon split"])] for axes, sizes, whole in cases]


def test_two_axes() -> None:
    for rank_results in zip(*spawn(two_axes, 4), strict=True):
        check([result for _, result in rank_results], rank_results[0][0])


# ---------------------------------------------------------------- checkpoints


def store(world: Any, folder: str, kind: str, load: bool) -> float:
    """Train two steps and save, or load into a fresh optimizer and compare a third step with one process that was never interrupted."""
    import chz
    from _shards import Shards, layouts_of
    from intarsia.comm import SelfCommunicator
    from intarsia.contracts import OptimizerGroup, StateItem
    from intarsia.mesh import Mesh
    from intarsia.plugins import current
    from intarsia.train.state import OptimizerState
    from intarsia_checkpoint_posix.storage import PosixStorage
    from intarsia_testing.layout import pack
    from intarsia_testing.stateful import Holder, OverStorage

    config = chz.replace(configs()["muon"], state_dtype="bfloat16")

    def built(shards: Any, comm: Any) -> Any:
        return current().target(current().entry_of(config))(config, [OptimizerGroup("default", shards.parameters)], shards.table, comm)

    shards = Shards(layouts_of([("dp_shard", world.size, made(kind))]), Mesh({"dp_shard": world.size}, world))
    optimizer = built(shards, world)
    manager = OverStorage(PosixStorage(folder), world, {"mesh": {"dp_shard": world.size}})
    weights = Holder(*(StateItem("model", name, "tensor", p.detach(), shards.layouts[name]) for name, p in shards.parameters.items()))
    owners = [weights, OptimizerState(optimizer, shards.table)]
    if not load:
        for step in range(2):
            shards.differentiate(step)
            optimizer.step(1.0)
        manager.save(2, owners)
        manager.wait()
        manager.close()
        return 0.0
    manager.load(manager.latest(), owners)
    shards.differentiate(2)
    optimizer.step(1.0)
    one = Shards()
    reference = built(one, SelfCommunicator())
    for step in range(3):
        one.differentiate(step)
        reference.step(1.0)
    worst = 0.0
    for name, parameter in shards.parameters.items():
        expected = torch.zeros(parameter.numel())
        pack(one.parameters[name].detach().view(one.shapes[name]), shards.regions[name], expected)
        worst = max(worst, float((expected - parameter.detach()).abs().max()) if parameter.numel() else 0.0)
        assert float(optimizer.slots()[name].get("step", torch.tensor(3.0))) == 3.0
    return worst


def test_a_run_saved_under_one_placement_goes_on_under_another(tmp_path: Any) -> None:
    spawn(store, 2, str(tmp_path), "flat", False)
    assert max(spawn(store, 3, str(tmp_path), "owned", True)) <= 2e-5


def declare(world: Any, stray: str) -> list[Any]:
    """One matrix on each of two pipeline stages, and declarations for both; `stray` is one of no stage's."""
    from intarsia.config import MeshConfig
    from intarsia.contracts import Init, OptimizerGroup
    from intarsia.errors import UsageError
    from intarsia.mesh import Mesh, check_mesh
    from intarsia.parameters import ParameterInfo, ParameterTable
    from intarsia_optimizers.config import MuonConfig, SplitConfig
    from intarsia_optimizers.muon import build

    name, table = f"layers.{world.rank}.wq.weight", ParameterTable()
    table.mesh = Mesh(check_mesh(MeshConfig(pp=2), 2), world)
    table.add(ParameterInfo(name, (4, 6), "float32", Init("zeros")))
    globs = ("layers.0.*", "layers.1.*", stray) if stray else ("layers.0.*", "layers.1.*")
    config = MuonConfig(split=(SplitConfig(match=globs, blocks=2),), newton_schulz_dtype="float32")
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    try:
        optimizer = build(config, [OptimizerGroup("default", {name: parameter})], table, world)
    except UsageError as error:
        return [str(error)]
    parameter.grad = torch.ones(4, 6)
    optimizer.step(1.0)
    return ["", parameter.detach().flatten().tolist()]


def test_a_declaration_need_match_in_one_pipeline_stage_only() -> None:
    first, second = spawn(declare, 2, "")
    assert first == second and first[0] == "" and any(first[1])
    for message, *_ in spawn(declare, 2, "layer.0.*"):
        assert "matches 'layer.0.*', but no matrix that Muon updates is called so" in message
