"""Scenarios of sharding that need one process: what is refused and leaves nothing behind, where values lie, when they are there, and what is let go.

Numbers in brackets are those of `docs/reference/flexshard-scenarios.md`. Ranks that are not there are `FakeCommunicator`'s: their parts read zero.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from intarsia.comm import FakeCommunicator, SelfCommunicator
from intarsia.contracts import ALIGNMENT_BYTES, Box, Member, OptimizerGroup, Partition
from intarsia.errors import PluginError, UsageError
from intarsia.mesh import Mesh
from intarsia.train.state import OptimizerState
from intarsia_flexshard import payload as payload_module
from intarsia_flexshard import quantised
from intarsia_flexshard.config import BucketConfig
from intarsia_flexshard.tiles import Tiles, dequantise_tiles, quantise_tiles
from intarsia_models_common.build import Linear
from intarsia_optimizers import muon
from intarsia_optimizers.config import MuonConfig
from intarsia_placements.config import Column, Flat, Mixed, MixedRule, Owned, Row
from intarsia_testing.doubles import MemoryStorage
from intarsia_testing.stateful import OverStorage
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from _scenarios import Layer, Made, SlabPlacement, Slabs, Stack, WithForeign, on_meta, random, shard
from _sharded import placements
from _shards import Shards, layouts_of, placement


def two(rank: int = 0) -> FakeCommunicator:
    return FakeCommunicator(rank, 2)


def whole_values(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """What every sharding of the model starts from."""
    made = shard(model, SelfCommunicator(), whole=True, **options)
    return {name: value.detach().clone() for name, value in made.sharded.parameters().items()}


# ---------------------------------------------------------------- what is refused


class Answers:
    """A placement that answers for other members than it was asked for."""

    name, accepts = "answers", "box"

    def __init__(self, change: Any) -> None:
        self.change = change

    def partition(self, members: Any, ranks: int) -> Partition:
        asked = SlabPlacement(Slabs(shares=(1,) * ranks)).partition(members, ranks)
        return dataclasses.replace(asked, **self.change(asked))


def test_a_placement_answers_for_the_members_that_it_was_asked_for() -> None:
    """[4] One is missing, one too many, and something that is no placement."""
    less = Answers(lambda p: {"members": p.members[1:], "regions": p.regions[1:]})
    more = Answers(lambda p: {"members": (*p.members, Member("x", (2,))), "regions": (*p.regions, p.regions[0])})
    for wrong in (less, more):
        with pytest.raises(PluginError, match=r"'answers' broke its contract: it answered for other members"):
            shard(on_meta(nn.Linear, 4, 4), two(), placement=Slabs(), plugins=WithForeign(wrong))
    with pytest.raises(TypeError, match="PlacementConfig"):
        BucketConfig(name="a", match=("*",), placement="row")  # type: ignore[arg-type]


def test_a_placement_without_its_method_is_named_and_scalars_go_whole_to_somebody() -> None:
    """[5] What cuts rows has nothing to cut in a scalar: there it is an error, here one rank owns it."""
    halves = SimpleNamespace(name="half a placement", accepts="box")
    with pytest.raises(PluginError, match=r"Bucket 'root': SimpleNamespace, which Slabs chooses, is no placement: it lacks partition\."):
        shard(on_meta(nn.Linear, 4, 4), two(), placement=Slabs(), plugins=WithForeign(halves))
    for name, config in placements().items():
        numels = []
        for rank in range(2):
            module = on_meta(nn.Linear, 4, 4)
            module.register_parameter("scale", nn.Parameter(torch.empty((), device="meta")))
            numels.append(shard(module, two(rank), placement=config).sharded.parameters()["scale"].numel())
        assert sorted(numels) == ([1, 1] if name == "replicate" else [0, 1]), name


def test_a_build_that_fails_leaves_the_model_as_it_was() -> None:
    """[6] The last bucket's placement cannot cut it. Two dimensions in one bucket are what `mixed` is for."""
    model = on_meta(Stack)
    before = dict(model.named_parameters())
    wrong = BucketConfig(name="late", match=("layers.1.up.weight",), placement=Row(dim=2))
    with pytest.raises(UsageError, match=r"cannot cut member 'layers.1.up.weight' of shape \(12, 8\)"):
        shard(model, two(), blocks=model.blocks, buckets=(wrong,))
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(before[name] is after[name] and after[name].is_meta for name in before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    rules = (MixedRule(match="*.down.weight", placement=Column()),)
    made = shard(model, two(), blocks=model.blocks, placement=Mixed(rules=rules, default=Row()))
    shapes = {name: tuple(value.shape) for name, value in made.sharded.parameters().items()}
    assert shapes["layers.0.down.weight"] == (8, 6) and shapes["layers.0.up.weight"] == (6, 8)


def test_a_model_is_sharded_once() -> None:
    """[25] Again, a part and then the whole, the whole and then a part. CPUs, meshes of two dimensions and offload are ordinary here."""
    model = on_meta(Stack)
    shard(model, two(), blocks=model.blocks)
    with pytest.raises(
        UsageError, match=r"Stack is sharded already, wholly or in part: 'layers.0.norm.weight' is in the bucket 'layers.0'"
    ):
        shard(model, two(), blocks=model.blocks)
    with pytest.raises(UsageError, match="Layer is sharded already"):
        shard(model.layers[1], two())
    parts = on_meta(Stack)
    shard(parts.layers[0], two())
    with pytest.raises(UsageError, match=r"Stack is sharded already, wholly or in part: 'layers.0.norm.weight' is in the bucket 'root'"):
        shard(parts, two(), blocks=parts.blocks)
    four = FakeCommunicator(3, 4)
    made = shard(on_meta(Stack), four, mesh={"dp_replicate": 2}, offload="cpu")
    assert [axis for axis, _ in made.table["head.weight"].layout.axes] == ["dp_replicate", "dp_shard"]
    unmanaged = shard(on_meta(nn.Linear, 4, 4), SelfCommunicator(), whole=True).table
    unmanaged["weight"].layout = None
    with pytest.raises(PluginError, match="'weight' has no layout yet: the sharder has not run"):
        unmanaged.norm({"weight": torch.zeros(4, 4)}, SelfCommunicator())


# ---------------------------------------------------------------- where values lie


@pytest.mark.parametrize("name", ["row", "flat", "owned", "block"])
@pytest.mark.parametrize("rank", [0, 1])
def test_masters_are_views_of_their_buckets_buffer_and_equal_the_local_part(name: str, rank: int) -> None:
    """[7] And so are their gradients of one flat gradient."""
    model = on_meta(Stack)
    wholes = whole_values(on_meta(Stack))
    made = shard(model, two(rank), blocks=model.blocks, placement=placements()[name])
    assert made.differences(wholes, rtol=0) == []
    model(random(3, 8)).sum().backward()
    made.sharded.finish_gradients()
    for bucket in made.sharded.buckets:
        assert len(bucket.masters) > 1
        for tensors in (list(bucket.masters.values()), [master.grad for master in bucket.masters.values()]):
            pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
            assert len(pointers) == 1
        assert {m.untyped_storage().data_ptr() for m in bucket.masters.values()} == {bucket.shard.untyped_storage().data_ptr()}


def test_shares_that_are_not_even_are_what_a_placement_says() -> None:
    """[9] Two blocks of three, one of three: 12 and 6 of 18 rows. [15] Three and none: the second rank has no box. Facts cannot be changed, and outlive new buffers."""
    for shares, rows in (((2, 1), (12, 6)), ((3, 0), (18, 0))):
        for rank in range(2):
            made = shard(on_meta(nn.Linear, 4, 18, bias=False), two(rank), placement=Slabs(shares=shares))
            layout = made.table["weight"].layout
            assert layout is not None
            first = 0 if rank == 0 else rows[0]
            assert layout.local(rank) == ((Box((first, 0), (rows[rank], 4)),) if rows[rank] else ())
            assert made.sharded.parameters()["weight"].numel() == 4 * rows[rank]
            for value, field in ((layout, "regions"), (layout.local(0)[0], "start")):
                with pytest.raises(dataclasses.FrozenInstanceError):
                    setattr(value, field, ())
            made.sharded.set_prefetch(3)
            made.sharded.update(Nothing(), 1.0)
            assert made.table["weight"].layout is layout and made.sharded.parameters()["weight"].numel() == 4 * rows[rank]


class Nothing:
    """An optimizer that leaves everything as it is."""

    def step(self, factor: Any, names: Any = None) -> None:
        """Nothing."""


class Ranges:
    """Rank 0 has the first rows of `weight`, rank 1 the rest and all of `bias`."""

    name, accepts = "ranges", "box"

    def partition(self, members: Any, ranks: int) -> Partition:
        regions = {"weight": ((Box((0, 0), (2, 2)),), (Box((2, 0), (2, 2)),)), "bias": ((), (Box((0,), (4,)),))}
        return Partition(tuple(members), ranks, tuple(regions[member.name] for member in members))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranges_are_sent_from_where_they_lie_and_read_where_they_arrive(rank: int) -> None:
    """[10] Nothing is packed for the gather, nothing copied out of it; a gradient's local part is a view of what the reduction gave."""
    model = on_meta(nn.Linear, 2, 4)
    wholes = whole_values(on_meta(nn.Linear, 2, 4))
    made = shard(model, two(rank), placement=Slabs(), plugins=WithForeign(Ranges()))
    (bucket,) = made.sharded.buckets
    assert [master.numel() for master in made.sharded.parameters().values()] == [[4, 0], [4, 4]][rank]
    assert bucket.payload.send().data_ptr() == bucket.shard.data_ptr()
    model(random(3, 2)).square().sum().backward()
    arrival = bucket.payload.arrival
    for parameter in model.parameters():
        offset = parameter.data_ptr() - arrival.data_ptr()
        assert parameter.untyped_storage().data_ptr() == arrival.untyped_storage().data_ptr()
        assert 0 <= offset <= (arrival.numel() - parameter.numel()) * 4
    assert made.differences(wholes, {"weight": torch.cat([model.weight[:2].flatten(), model.weight[2:].flatten()][rank : rank + 1])}) == []
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    made.sharded.finish_gradients()
    assert made.differences(gradients, made.gradients(), rtol=0) == [] and len(made.gradients()) == 2
    assert len({gradient.untyped_storage().data_ptr() for gradient in made.gradients().values() if gradient.numel()}) == 1


def test_a_placement_of_somebody_elses_needs_no_more_than_boxes() -> None:
    """[16] Combed rows, known by their boxes alone: no flat ranges, no fast path. Layouts, norms and state follow."""
    wholes = whole_values(on_meta(nn.Linear, 4, 12, bias=False))
    squares = 0.0
    for rank in range(2):
        model = on_meta(nn.Linear, 4, 12, bias=False)
        made = shard(model, two(rank), placement=Slabs(shares=(3, 3), combed=True))
        (bucket,) = made.sharded.buckets
        assert bucket.geometry.starts == (None,) and len(made.table["weight"].layout.local(rank)) == 3
        assert made.differences(wholes, rtol=0) == []
        model(random(2, 4))
        mine = [slice(4 * turn + 2 * rank, 4 * turn + 2 * rank + 2) for turn in range(3)]
        assert all(torch.equal(model.weight[rows], wholes["weight"][rows]) for rows in mine)
        squares += float(made.table.norm(made.sharded.masters(), made.world)) ** 2
    assert squares == pytest.approx(float(wholes["weight"].norm()) ** 2, rel=1e-5)


def test_members_of_several_placements_share_one_collective() -> None:
    """[17] One rank or two, members of every kind: one gather, an exact round trip, and every member where any kernel likes it."""
    rules = (MixedRule(match="*.up.*", placement=Owned()), MixedRule(match="*.norm.*", placement=Flat()))
    mixed = Mixed(rules=rules, default=Row())
    wholes = whole_values(on_meta(Layer))
    for world in (SelfCommunicator(), two(0), two(1)):
        module = nn.Sequential(on_meta(Layer))
        made = shard(module, world, placement=mixed, dtypes=("float32", "bfloat16", "float32"))
        (bucket,) = made.sharded.buckets
        module(random(2, 8).bfloat16())
        assert made.calls() == ({"unshard root": 1} if world.size == 2 else {})
        masters = made.sharded.masters()
        for name, whole in wholes.items():
            parameter = module.get_parameter(f"0.{name}")
            begin = parameter.data_ptr() - bucket.payload.arrival.data_ptr()
            assert begin % ALIGNMENT_BYTES == 0 and parameter.dtype == torch.bfloat16
            layout = made.table[f"0.{name}"].layout
            assert layout is not None
            for box in layout.local(made.table.rank_in(layout)):
                index = tuple(map(slice, box.start, box.end))
                assert torch.equal(parameter[index], masters[f"0.{name}"].view(box.size).bfloat16())
            assert whole.shape == parameter.shape


def test_what_was_cut_before_is_known_by_its_place_in_the_whole() -> None:
    """[18] A tensor that tensor parallelism has cut before is known by its place in the whole, and stays there under every inner placement."""
    cut = ((("tp", 2, placement("row"))),)
    for name, config in placements().items():
        if name in ("mixed", "replicate"):
            continue
        starts = []
        for rank in range(4):
            model = on_meta(nn.Linear, 3, 4, bias=False)
            made = shard(model, FakeCommunicator(rank, 4), mesh={"tp": 2}, outer={"weight": ((8, 3), cut)}, placement=config)
            layout = made.table["weight"].layout
            assert layout is not None and layout.shape == (8, 3) and layout.axes == (("tp", 2), ("dp_shard", 2))
            starts += [(rank % 2, box.start[0]) for box in layout.local(made.table.rank_in(layout))]
        assert all((start >= 4) == (tp == 1) for tp, start in starts), name
        assert len({tp for tp, _ in starts}) == 2


# ---------------------------------------------------------------- optimizer state


def test_momentum_keeps_its_names_and_its_place_in_the_whole() -> None:
    """[19] Saved in one order, loaded in another; rows 12 to 24 of a matrix that tensor parallelism has cut are saved as these."""
    storage = MemoryStorage()

    def built(shards: Shards) -> muon.Muon:
        optimizer = muon.build(MuonConfig(), [OptimizerGroup("default", shards.parameters)], shards.table, SelfCommunicator())
        shards.differentiate(0)
        return optimizer

    shapes: dict[str, tuple[int, ...]] = {"a.weight": (24, 4), "b.weight": (6, 8), "c.weight": (8, 6)}
    shards = Shards(shapes=shapes)
    optimizer = built(shards)
    optimizer.step(1.0)
    manager = OverStorage(storage)
    manager.save(1, [OptimizerState(optimizer, shards.table)])
    manager.wait()
    manager.close()
    turned = Shards(shapes=dict(reversed(shapes.items())))
    other = built(turned)
    loader = OverStorage(storage)
    ref = loader.latest()
    assert ref is not None
    loader.load(ref, [OptimizerState(other, turned.table)])
    loader.close()
    for name, slots in optimizer.slots().items():
        assert torch.equal(slots["momentum"], other.slots()[name]["momentum"]) and slots["momentum"].any(), name
    mesh = Mesh({"tp": 2}, two(1))
    cut = Shards(layouts_of([("tp", 2, placement("row"))], shapes), mesh, shapes=shapes)
    items = {item.name: item for item in OptimizerState(built(cut), cut.table).state()}
    layout = items["a.weight/momentum"].layout
    assert layout is not None and layout.shape == (24, 4) and layout.local(1) == (Box((12, 0), (12, 4)),)
    assert items["a.weight/momentum"].value.numel() == 48


# ---------------------------------------------------------------- float8 on the wire


class Quantised(nn.Module):
    """Layers that read float8, recomputed in backward."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(Linear(32, 32, 1.0) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Through all of them."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def test_payload_and_scales_come_in_one_gather_and_are_made_once_for_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """[21] One gather of the packed buffer. [22] Recomputation, backward and micro-batches send what is there; an edit that moves no version counter is sent once it is told."""
    made_tiles = []

    def counted(*arguments: Any) -> None:
        made_tiles.append(arguments)
        quantise_tiles(*arguments)

    monkeypatch.setattr(quantised, "best_tiles", lambda device: Tiles(counted, dequantise_tiles))
    model = on_meta(Quantised, True)
    blocks = [f"layers.{index}" for index in range(4)]
    options: dict[str, Any] = {"payload": "fp8", "tile": (4, 4), "prefetch": 0, "placement": Flat(unit=1)}
    made = shard(model, two(), blocks=blocks, dtypes=("float32", "bfloat16", "float32"), **options)
    for number in range(3):
        made.sharded.set_last_micro_batch(number == 2)
        model(random(3, 32).bfloat16().requires_grad_()).sum().backward()
    made.sharded.finish_gradients()
    assert len(made_tiles) == 4
    gathers = {what: each for b in made.sharded.buckets for what, each in b.groups.gather.stats().items()}
    assert set(gathers) == {f"unshard {name}" for name in blocks}
    for bucket in made.sharded.buckets:
        each = gathers[f"unshard {bucket.name}"]
        assert 1 <= each.calls <= 6 and each.bytes == each.calls * bucket.payload.counts[1]
        assert 32 * 32 + 64 * 4 <= sum(bucket.payload.counts) < 0.75 * 2 * 32 * 32
    before = made.sharded.buckets[0].payload.send().clone()
    next(iter(made.sharded.parameters().values())).data[0] += 64
    made.sharded.after_update()
    model(random(3, 32).bfloat16())
    assert len(made_tiles) == 8 and not torch.equal(made.sharded.buckets[0].payload.send(), before)


# ---------------------------------------------------------------- when parameters are there


def test_a_model_that_was_never_anywhere_gets_its_shards() -> None:
    """[26] From the meta device, in pieces."""
    model = on_meta(Stack)
    made = shard(model, two(), blocks=model.blocks)
    assert not any(parameter.is_meta for parameter in [*model.parameters(), *made.sharded.parameters().values()])
    held, whole = (sum(p.numel() for p in each) for each in (made.sharded.parameters().values(), on_meta(Stack).parameters()))
    assert whole / 2 <= held < 0.55 * whole
    model(random(2, 8)).sum().backward()
    made.sharded.finish_gradients()
    assert set(made.gradients()) == set(made.table) and all(gradient.isfinite().all() for gradient in made.gradients().values())


def test_a_compiled_block_is_one_graph_without_collectives() -> None:
    """[27] Gathers and sums are outside of what is compiled: the graph has neither, is not broken, and is not made again."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    model = on_meta(Stack, 4)
    made = shard(model, two(), blocks=model.blocks)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True, dynamic=False)
    seen = 0
    for step in range(3):
        model(random(2, 8, seed=step)).sum().backward()
        made.sharded.finish_gradients()
        made.sharded.update(Nothing(), 1.0)
        made.sharded.zero_gradients()
        # One graph for the layers' common code; the first layer's input needs no gradient.
        assert 1 <= len(graphs) <= 4
        seen = len(graphs) if step == 0 else seen
    assert len(graphs) == seen and not any("gather" in name or "reduce" in name or "wait" in name for graph in graphs for name in graph)
    assert made.calls()["unshard layers.0"] > 1


@pytest.mark.parametrize("reshard", ["always", "never"])
def test_when_parameters_can_be_read(reshard: str) -> None:
    """[29] They read NaN outside of their module, between forward and backward iff they are given back there, and after the step; they are the same objects at the same places
    throughout, and have the attributes that the model gave them."""
    model = on_meta(Stack, 4)
    for name, parameter in model.named_parameters():
        parameter.colour = name  # type: ignore[attr-defined]
    made = shard(model, two(), blocks=model.blocks, reshard=reshard, prefetch=0, debug=True)
    first = model.layers[0].up.weight
    seen: list[Any] = []

    def look(module: nn.Module, *arguments: Any) -> None:
        weight = module.up.weight  # type: ignore[union-attr]
        seen.append((weight, weight.data_ptr(), bool(weight.isnan().any()), list(model.parameters())[2] is first))

    model.layers[0].register_forward_pre_hook(look)
    lost = reshard == "always"
    for step in range(3):
        loss = model(model(random(2, 8, seed=step).requires_grad_())).sum()
        assert bool(first.isnan().all()) == lost
        loss.backward()
        assert bool(first.isnan().all()) == lost
        made.sharded.finish_gradients()
        made.sharded.update(Nothing(), 1.0)
        made.sharded.zero_gradients()
        with torch.no_grad():
            model(random(2, 8))
        assert bool(first.isnan().all()) == lost
    assert len(seen) == 9 and {(id(weight), place) for weight, place, *_ in seen} == {(id(first), first.data_ptr())}
    assert not any(is_nan for _, _, is_nan, _ in seen) and all(same for *_, same in seen)
    assert all(parameter.colour == name for name, parameter in model.named_parameters())  # type: ignore[attr-defined]


def test_what_is_gathered_is_copied_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """[30] Ranges are read where they arrive; rows of several matrices are copied out by one call for the bucket. Four blocks in two buffers: six gathers in a step; four if
    they stay."""
    copies: list[int] = []
    original = torch._foreach_copy_

    def counted(targets: Any, sources: Any) -> None:
        copies.append(len(targets))
        original(targets, sources)

    monkeypatch.setattr(payload_module, "torch", SimpleNamespace(_foreach_copy_=counted))
    for config, reshard, gathers in ((Flat(unit=1), "always", 6), (Column(), "always", 6), (Column(), "never", 4)):
        copies.clear()
        model = on_meta(Stack, 4)
        made = shard(model, two(), blocks=model.blocks, placement=config, reshard=reshard)
        model(random(2, 8)).sum().backward()
        calls = {what: count for what, count in made.calls().items() if what.startswith("unshard layers")}
        assert sum(calls.values()) == gathers, (config, reshard, calls)
        assert len(copies) == (0 if isinstance(config, Flat) else gathers + 1)


# ---------------------------------------------------------------- sums


@pytest.mark.parametrize(
    "dtypes", [("float32", "float32", "float32"), ("float32", "bfloat16", "float32"), ("float32", "bfloat16", "bfloat16")]
)
def test_a_group_of_one_divides_too(dtypes: tuple[str, str, str]) -> None:
    """[38]"""
    found = {}
    for divisor in (None, 4.0, 8.0):
        model = on_meta(nn.Linear, 4, 4)
        settings = {"reduce_op": "sum"} if divisor is None else {"reduce_op": "average", "divisor": divisor}
        made = shard(model, SelfCommunicator(), dtypes=dtypes, **settings)
        model(random(3, 4).to(getattr(torch, dtypes[1]))).float().square().sum().backward()
        made.sharded.finish_gradients()
        found[divisor] = made.gradients()
    for divisor in (4.0, 8.0):
        assert all(torch.equal(found[divisor][name] * divisor, found[None][name]) for name in ("weight", "bias"))
    assert found[None]["weight"].dtype == torch.float32 and found[None]["weight"].any()


# ---------------------------------------------------------------- what is let go


class Both(nn.Module):
    """A stage whose blocks take two inputs, the second one derived from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoInputs() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Through all of them."""
        for layer in self.layers:
            x = layer(x, x * 2)
        return x


class TwoInputs(nn.Module):
    """up(x) + down(y)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """As wide as they came."""
        return self.up(x).tanh() + self.down(y)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is alive is held by somebody, not forgotten in a cycle."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    yield
    if was_enabled:
        gc.enable()


def stage_step(made: Made, driver: str, micro_batches: int, held: list[Any]) -> None:
    """One step of a stage: two forward passes ahead, then backward and forward in turn. `held` gets weak references to what was received."""
    waiting: list[tuple[Tensor, Tensor]] = []
    names = [bucket.name for bucket in made.sharded.buckets]
    if driver == "schedule":
        for name in names:
            made.sharded.unshard(name, wait=False)
        for name in names:
            made.sharded.unshard(name)

    def backward() -> None:
        received, output = waiting.pop(0)
        done = len(held) == micro_batches and not waiting
        made.sharded.set_last_micro_batch(done)
        output.backward(random(2, 8, seed=9))
        assert received.grad is not None

    for number in range(micro_batches):
        made.sharded.set_last_micro_batch(False)
        received = random(2, 8, seed=number).requires_grad_()
        held.append(weakref.ref(received))
        waiting.append((received, made.model(received)))
        del received
        if len(waiting) > 2:
            backward()
    while waiting:
        backward()
    if driver == "schedule":
        for name in reversed(names):
            made.sharded.reduce(name)
            made.sharded.reshard(name)
    made.sharded.finalise()


@pytest.mark.parametrize(("driver", "reshard"), [("hooks", "always"), ("hooks", "never"), ("schedule", "never")])
def test_a_stage_keeps_nothing_that_it_received(driver: str, reshard: str, no_collection: None) -> None:
    """[39] Three steps of eight micro-batches, without the garbage collector. Nothing is under way between steps."""
    model = on_meta(Both)
    made = shard(model, two(), blocks=[f"layers.{index}" for index in range(3)], reshard=reshard)
    made.sharded.drive(driver)
    for _ in range(3):
        held: list[Any] = []
        stage_step(made, driver, 8, held)
        assert len(held) == 8 and [number for number, each in enumerate(held) if each() is not None] == []
        for bucket in made.sharded.buckets:
            assert not bucket.is_flying and not bucket.is_in_use and not bucket.reduction.is_waiting and not bucket.calls
        assert all(gradient.any() for gradient in made.gradients().values()) and len(made.gradients()) == 12
        made.sharded.update(Nothing(), 1.0)
        made.sharded.zero_gradients()
    assert {calls for what, calls in made.calls().items() if what.startswith("reduce")} == {3}


# ---------------------------------------------------------------- the table

TESTS = Path(__file__).parents[1]
PLACES = {
    "S1": "unit/test_flexshard_scenarios.py",
    "S2": "distributed/test_flexshard_scenarios.py",
    "S4": "distributed/test_flexshard_scenarios.py",
    "gpu": "gpu/test_flexshard_gpu.py",
    "assign": "unit/test_flexshard_assign.py",
    "quantised": "unit/test_flexshard_quantised.py",
    "muon": "unit/test_optimizers_muon.py",
}


def test_the_table_has_every_scenario_and_its_tests_exist() -> None:
    text = (TESTS.parent / "docs" / "reference" / "flexshard-scenarios.md").read_text()
    rows = [row.split(" | ") for row in text.splitlines() if re.match(r"\| \d+ \|", row)]
    assert sorted(int(row[0].strip("| ")) for row in rows) == list(range(1, 43))
    for row in rows:
        named = re.findall(r"`([\w/.]+)(?:::|\[)(\w+)\]?`", row[2])
        assert named, row[0]
        for place, test in named:
            source = (TESTS / PLACES.get(place, place)).read_text()
            function = {"S2": f"case_{test}", "S4": f"case4_{test}"}.get(place, test)
            assert f"def {function}(" in source, (row[0], place, test)


def test_a_torch_that_cannot_be_followed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from intarsia_flexshard.parameters import check_torch

    check_torch()
    monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    with pytest.raises(UsageError, match="_will_engine_execute_node, which torch"):
        check_torch()
