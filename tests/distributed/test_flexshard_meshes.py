"""FlexShard on meshes of several kinds of parallelism equals one process: gradients, their norm, and steps of AdamW and Muon.

The model cuts itself by hand: every rank computes its own tokens, tp cuts the hidden units of a region, ep the experts of a stack; both unevenly. What a mesh does not cut gives
gradients that are partial sums over all ranks, which FlexShard adds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from _scenarios import Made, on_meta, random, shard
from _spawn import spawn
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.config import MeshConfig
from intarsia.contracts import Init, OptimizerGroup, Regions
from intarsia.errors import DistributedError, UsageError
from intarsia.layout import whole_region
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable
from intarsia.plugins import current
from intarsia_flexshard.config import BucketConfig, FlexShardConfig
from intarsia_flexshard.runtime import FlexShard
from intarsia_optimizers.config import AdamWConfig, MuonConfig
from intarsia_parallel.collectives import even_counts, exchange, gather, scatter_sum
from intarsia_placements.config import Column, Flat, Owned, Row
from torch import Tensor, nn
from torch.nn import functional

DIM, HIDDEN, EXPERTS, TOKENS = 8, 13, 5, 22
MUON = MuonConfig(lr=0.02, weight_decay=0.05, newton_schulz_dtype="float32", not_matrices=("norm", "head"))
ADAMW = AdamWConfig(lr=0.02)
LAYERS = ("layers.0", "layers.1", "layers.2")


class Layer(nn.Module):
    """x + down(gelu(up(norm x))) + gate(x) expert(x). This process has `hidden` of the hidden units and `experts` of the experts."""

    def __init__(self, hidden: int = HIDDEN, experts: int = EXPERTS) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, hidden), nn.Linear(hidden, DIM, bias=False)
        self.gate, self.experts = nn.Linear(DIM, 1), Experts(experts)
        self.tp: Communicator = SelfCommunicator()

    def forward(self, x_ND: Tensor, ids_N: Tensor) -> Tensor:
        """This rank's tokens and their experts."""
        counts = self.tp.gather_json(len(x_ND))
        region_ND = gather(self.norm(x_ND), 0, counts, self.tp)
        y_ND = scatter_sum(self.down(functional.gelu(self.up(region_ND))), 0, counts, self.tp)
        return x_ND + y_ND + self.gate(x_ND).sigmoid() * self.experts(x_ND, ids_N)


class Experts(nn.Module):
    """One matrix for each expert; tokens travel to theirs and back."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight_EDD = nn.Parameter(torch.empty(count, DIM, DIM))
        self.ep: Communicator = SelfCommunicator()

    def forward(self, x_ND: Tensor, ids_N: Tensor) -> Tensor:
        """[N, D]."""
        counts = even_counts(EXPERTS, self.ep.size)
        owner_N = torch.repeat_interleave(torch.arange(self.ep.size), torch.tensor(counts))[ids_N]
        order_N = owner_N.argsort(stable=True)
        table = self.ep.gather_json(torch.bincount(owner_N, minlength=self.ep.size).tolist())
        sent, received = table[self.ep.rank], [row[self.ep.rank] for row in table]
        rows_MD = exchange(x_ND[order_N], sent, received, self.ep)
        rows_M1 = exchange(ids_N[order_N, None].float(), sent, received, self.ep)
        mine_M = rows_M1[:, 0].long() - sum(counts[: self.ep.rank])
        done_MD = torch.einsum("md,mdh->mh", rows_MD, self.weight_EDD[mine_M]).tanh()
        return exchange(done_MD, received, sent, self.ep)[order_N.argsort()]


class Stack(nn.Module):
    """Three layers and a head."""

    def __init__(self, hidden: int = HIDDEN, experts: int = EXPERTS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, experts) for _ in LAYERS)
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x_ND: Tensor, ids_N: Tensor, stage: Sequence[int] | None = None) -> Tensor:
        """[N, D]. `stage` names some of the layers, for schedules."""
        for index in range(len(self.layers)) if stage is None else stage:
            x_ND = self.layers[index](x_ND, ids_N)
        return self.head(x_ND) if stage is None or len(self.layers) - 1 in stage else x_ND


def made_on(world: Communicator, sizes: Mapping[str, int], **settings: Any) -> Made:
    """The model, sharded on a mesh."""
    mesh = Mesh(check_mesh(MeshConfig(**sizes), world.size), world)
    tp, ep = mesh.sizes["tp"], mesh.sizes["ep"]
    model = on_meta(Stack, even_counts(HIDDEN, tp)[mesh.coordinates["tp"]], even_counts(EXPERTS, ep)[mesh.coordinates["ep"]])
    by_row, by_column = (current().build(config) for config in (Row(), Column()))
    outer: dict[str, Any] = {}
    for name in LAYERS:
        if tp > 1:
            outer[f"{name}.up.weight"] = ((HIDDEN, DIM), (("tp", tp, by_row),))
            outer[f"{name}.up.bias"] = ((HIDDEN,), (("tp", tp, by_row),))
            outer[f"{name}.down.weight"] = ((DIM, HIDDEN), (("tp", tp, by_column),))
        if ep > 1:
            outer[f"{name}.experts.weight_EDD"] = ((EXPERTS, DIM, DIM), (("ep", ep, by_row),))
    made = shard(model, world, mesh=sizes, blocks=LAYERS, outer=outer, **settings)
    for layer in model.layers:
        layer.tp, layer.experts.ep = made.mesh.comm("tp"), made.mesh.comm("ep")
    return made


def alone(**settings: Any) -> Made:
    """One process."""
    return shard(on_meta(Stack), SelfCommunicator(), blocks=LAYERS, **(settings or {"whole": True}))


def tokens(made: Made, number: int) -> Tensor:
    """This rank's tokens of micro-batch `number`: unevenly many, on some ranks none in the last one."""
    axes = ("dp_replicate", "dp_shard", "cp", "tp")
    part, parts = 0, 1
    for axis in axes:
        part, parts = part * made.mesh.sizes[axis] + made.mesh.coordinates[axis], parts * made.mesh.sizes[axis]
    whole_ND = random(TOKENS if number % 2 == 0 else 3, DIM, seed=number)
    counts = even_counts(len(whole_ND), parts)
    mine_ND = whole_ND[sum(counts[:part]) :][: counts[part]]
    return mine_ND.to(made.model.head.weight.dtype).requires_grad_()


def ids_of(x_ND: Tensor) -> Tensor:
    """A token's expert is told by its signs: the same wherever it is computed."""
    return (x_ND.detach()[:, :4] > 0).long() @ torch.tensor([1, 2, 4, 8]) % EXPERTS


def loss_of(made: Made, number: int) -> Tensor:
    """A sum over tokens, divided by how many there are everywhere."""
    x_ND = tokens(made, number)
    return made.model(x_ND, ids_of(x_ND)).float().square().sum() / TOKENS


def hooks(made: Made, numbers: Sequence[int]) -> None:
    """Micro-batches one after the other."""
    for number in numbers:
        made.sharded.set_last_micro_batch(number == numbers[-1])
        loss_of(made, number).backward()


def schedule(made: Made, numbers: Sequence[int]) -> None:
    """Two stages of one rank, all forward passes first; the first stage's weight gradients are computed apart and written by hand."""
    sharded = made.sharded
    sharded.drive("schedule")
    sides = [[bucket.name for bucket in sharded.buckets if bucket.name.startswith(f"layers.{i}")] for i in range(len(LAYERS))]
    roots = [bucket.name for bucket in sharded.buckets if bucket.is_kept]
    stages = [(sides[0], [0]), (sides[1] + sides[2], [1, 2])]
    for name in roots:
        sharded.unshard(name)
    inputs, middles, outputs = [], [], []
    for names, _ in stages:
        for name in names:
            sharded.unshard(name, wait=False)
    for name in [name for names, _ in stages for name in names]:
        sharded.unshard(name)
    for number in numbers:
        inputs.append(tokens(made, number))
        middles.append(made.model(inputs[-1], ids_of(inputs[-1]), stage=stages[0][1]))
        outputs.append(middles[-1].detach().requires_grad_())
    pairs = zip(outputs, map(ids_of, inputs), strict=True)
    losses = [made.model(each, ids, stage=stages[1][1]).square().sum() / TOKENS for each, ids in pairs]
    for number, loss in enumerate(losses):
        loss.backward()
        if number < len(losses) - 1:
            for name in (*roots, *stages[1][0]):
                sharded.accumulate(name)
    for name in (*stages[1][0], *roots):
        sharded.reduce(name)
    for name in stages[1][0]:
        sharded.reshard(name)
    first = list(made.model.layers[0].parameters())
    for middle, output in zip(middles, outputs, strict=True):
        gradients = torch.autograd.grad(middle, first, output.grad)
        for parameter, gradient in zip(first, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    for name in stages[0][0]:
        sharded.reduce(name)
        sharded.reshard(name)


def steps(
    made: Made, config: Any, run: Callable[[Made, Sequence[int]], None], early: bool = False, micro_batches: int = 2
) -> dict[str, Any]:
    """Three steps: this rank's gradients of the last one, the norms, the masters."""
    trained = dict(made.sharded.parameters())
    optimizer = current().build(config, [OptimizerGroup("default", trained)], made.table, made.world)
    norms, gradients = [], {}
    for step in range(3):
        numbers = [10 * step + number for number in range(micro_batches)]
        with made.sharded.update_in_backward(optimizer, 1.0) if early else contextlib.nullcontext():
            run(made, numbers)
            made.sharded.finish_gradients()
        if not early:
            norms.append(float(made.table.norm(made.gradients(), made.world)))
            gradients = {name: gradient.clone() for name, gradient in made.gradients().items()}
        made.sharded.update(optimizer, 1.0)
        made.sharded.zero_gradients()
    masters = {name: value.detach().clone() for name, value in made.sharded.masters().items()}
    return {"norms": norms, "gradients": gradients, "masters": masters, "facts": getattr(optimizer, "facts", dict)()}


def compare(
    world: Communicator,
    sizes: Mapping[str, int],
    config: Any,
    run: Callable[[Made, Sequence[int]], None] = hooks,
    early: bool = False,
    rtol: float = 2e-5,
    dtypes: tuple[str, str, str] = ("float32", "float32", "float32"),
    **settings: Any,
) -> list[str]:
    """What differs from one process."""
    exact = {} if dtypes[1] == "float32" and settings.get("payload") is None else {**settings, "dtypes": dtypes}
    exact.pop("placement", None)
    wanted = steps(alone(**exact), config, hooks)
    made = made_on(world, sizes, placement=settings.pop("placement", Row()), dtypes=dtypes, debug=True, **settings)
    got = steps(made, config, run, early)
    found = made.differences(wanted["masters"], got["masters"], rtol)
    if not early:
        found += made.differences(wanted["gradients"], got["gradients"], rtol)
        found += [f"norms {got['norms']} instead of {wanted['norms']}"] * (
            max(abs(a / b - 1) for a, b in zip(got["norms"], wanted["norms"], strict=True)) > rtol
        )
    if isinstance(config, MuonConfig) and not early:
        cut = set(got["facts"]["cut_parameters"])
        tp_cut = {name for name in made.table if made.mesh.sizes["tp"] > 1 and name.endswith(("up.weight", "down.weight"))}
        # Planned and counted: what tp cuts travels, whatever the placement; experts do only where their matrices are cut.
        found += [f"cut {sorted(cut)}"] * (not tp_cut <= cut or (isinstance(settings.get("placement"), Owned) and cut != tp_cut))
        received = got["facts"]["transfer_bytes"]
        found += ["nothing was transferred"] * (bool(cut) and sum(world.gather_json(received)) == 0)
    return found


CASES: dict[int, dict[str, tuple[Mapping[str, int], dict[str, Any]]]] = {
    2: {
        "tp2 adamw": ({"tp": 2}, {"config": ADAMW}),
        "tp2 muon": ({"tp": 2}, {"config": MUON, "placement": Owned()}),
        "ep2 adamw": ({"ep": 2}, {"config": ADAMW}),
        "ep2 muon, experts not cut again": ({"ep": 2}, {"config": MUON}),
        "tp2 ep2, all at once": ({"tp": 2, "ep": 2}, {"config": ADAMW, "placement": Flat(unit=1)}),
        "cp2": ({"cp": 2}, {"config": ADAMW, "placement": Flat(unit=1)}),
        "cp2 ep2 by a schedule": ({"cp": 2, "ep": 2}, {"config": ADAMW, "run": schedule}),
        "tp2 by a schedule": ({"tp": 2}, {"config": MUON, "run": schedule}),
        "cp2 ep2": ({"ep": 2, "cp": 2}, {"config": MUON, "placement": Owned()}),
        "tp2 updated in backward": ({"tp": 2}, {"config": ADAMW, "early": True}),
        "ep2 fp8": ({"ep": 2}, {"config": ADAMW, "payload": "fp8", "tile": (4, 4), "rtol": 2e-4}),
        "ep2 reduced always": ({"ep": 2}, {"config": ADAMW, "gradients": "sharded"}),
    },
    4: {
        "dp2 tp2": ({"tp": 2}, {"config": MUON}),
        "dp2 tp2 owned": ({"tp": 2}, {"config": MUON, "placement": Owned()}),
        "dp2 ep2, experts cut again": ({"ep": 2}, {"config": MUON, "placement": Row(dim=-1)}),
        "dp2 ep2 owned, updated in backward": ({"ep": 2}, {"config": ADAMW, "placement": Owned(), "early": True}),
        "replicas tp2": ({"dp_replicate": 2, "tp": 2}, {"config": ADAMW, "placement": Flat(unit=1)}),
        "replicas ep2": ({"dp_replicate": 2, "ep": 2}, {"config": MUON, "placement": Owned()}),
        "cp2 tp2 ep4": ({"cp": 2, "tp": 2, "ep": 4}, {"config": ADAMW}),
        "tp4": ({"tp": 4, "ep": 2}, {"config": MUON, "run": schedule}),
        "split masters": (
            {"tp": 2, "ep": 2},
            {"config": ADAMW, "master": "split", "dtypes": ("float32", "bfloat16", "float32"), "rtol": 0.1},
        ),
    },
}


def run_cases(world: Communicator) -> dict[str, list[str]]:
    return {name: compare(world, sizes, **options) for name, (sizes, options) in CASES[world.size].items()}


# ---------------------------------------------------------------- a pipeline with tied ends


class Tied(nn.Module):
    """A table, layers, and a head that reads the table."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table: Any = nn.Embedding(11, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(layers))
        self.head: Any = nn.Linear(DIM, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        """What this process has of it."""
        x = x if self.table is None else self.table(x)
        for layer in self.layers:
            x = x if layer is None else x + layer(x).tanh()
        return x if self.head is None else self.head(x)

    def regions(self) -> Regions:
        """Layers are blocks."""
        return Regions(blocks=tuple(f"layers.{index}" for index in range(len(self.layers))), ties=(("table.weight", "head.weight"),))

    def inits(self) -> dict[str, Init]:
        """All alike."""
        return {name: Init("normal", std=0.3) for name, _ in self.named_parameters()}


def piped(world: Communicator, stages: int, config: Any, early: bool = False, **settings: Any) -> Made:
    """The model, of which this process keeps its stage; one layer in each."""
    mesh = Mesh(check_mesh(MeshConfig(pp=stages), world.size), world)
    model, mine = on_meta(Tied, stages), mesh.coordinates["pp"]
    table = ParameterTable.from_model(model, seed=3)
    if stages > 1:
        model.table, model.head = model.table if mine == 0 else None, model.head if mine == stages - 1 else None
        for index in range(stages):
            model.layers[index] = model.layers[index] if index == mine else None  # type: ignore[assignment]
        table.keep([name for name, _ in model.named_parameters(remove_duplicate=False)])
    made = Made(model, table, FlexShard(FlexShardConfig(**settings), current()).shard(model, table, mesh, world), mesh, world)
    optimizer = current().build(config, [OptimizerGroup("default", dict(made.sharded.parameters()))], table, world)
    pipeline, norms = mesh.comm("pp"), []
    for step in range(3):
        with made.sharded.update_in_backward(optimizer, 1.0) if early else contextlib.nullcontext():
            for number in range(2):
                made.sharded.set_last_micro_batch(number == 1)
                passed(made, pipeline, stages, (torch.arange(6) * (step + 2) + 3 * number + 5 * mesh.coordinates["dp_shard"]) % 11)
            made.sharded.finish_gradients()
        if not early:
            norms.append(float(table.norm(made.gradients(), world)))
        made.sharded.update(optimizer, 1.0)
        made.sharded.zero_gradients()
    made.norms = norms  # type: ignore[attr-defined]
    return made


def passed(made: Made, pipeline: Communicator, stages: int, tokens_N: Tensor) -> None:
    """A micro-batch, forward and backward; activations go from stage to stage as plain numbers."""
    x, last = tokens_N, pipeline.rank == stages - 1
    for stage in range(stages):
        if stage == pipeline.rank:
            y = made.model(x)
        arrived = pipeline.gather_json(y.tolist() if stage == pipeline.rank and not last else None)[stage]
        if stage == pipeline.rank - 1:
            x = torch.tensor(arrived, requires_grad=True)
    loss = functional.cross_entropy(y, (tokens_N * 3 + 1) % 11, reduction="sum") / 12 if last else y
    gradient = None
    for stage in reversed(range(stages)):
        if stage == pipeline.rank:
            loss.backward(gradient)
        arrived = pipeline.gather_json(x.grad.tolist() if stage == pipeline.rank > 0 else None)[stage]
        if stage == pipeline.rank + 1:
            gradient = torch.tensor(arrived)


def tied_pipelines(world: Communicator, stages: int) -> list[str]:
    """Both holders of the tie have the one process's values; the norm counts it once; a bucket is one stage's alone. With dp_shard 2 both ranks train on other tokens."""
    shards = world.size // stages
    found = []
    options: list[tuple[Any, dict[str, Any]]] = [
        (ADAMW, {}),
        (ADAMW, {"early": True, "placement": Flat(unit=1)}),
        (MUON, {"placement": Owned(), "buckets": (BucketConfig(name="last", match=(f"layers.{stages - 1}",), placement=Row()),)}),
    ]
    for config, settings in options:
        made = piped(world, stages, config, **settings)
        wanted = reference(stages, shards, config)
        found += made.differences(wanted["masters"])
        norms = [abs(a / b - 1) for a, b in zip(made.norms, wanted["norms"], strict=False)]  # type: ignore[attr-defined]
        found += [f"norms {norms}"] * (max(norms, default=0.0) > 1e-5)
        holders = [bucket.name for bucket in made.sharded.buckets if bucket.holders is not None]
        found += [f"{holders}"] * (holders != ["root:table.weight"] * (made.mesh.coordinates["pp"] in (0, stages - 1)))
    return found


def reference(stages: int, shards: int, config: Any) -> dict[str, Any]:
    """One process that runs all ranks' micro-batches."""
    model = Tied(stages)
    table = ParameterTable.from_model(model, seed=3)
    parameters = dict(model.named_parameters())
    for name, info in table.items():
        table.fill(name, whole_region(info.shape), parameters[name].data)
    optimizer = current().build(config, [OptimizerGroup("default", parameters)], table, SelfCommunicator())
    norms = []
    for step in range(3):
        for number in range(2):
            for part in range(shards):
                tokens_N = (torch.arange(6) * (step + 2) + 3 * number + 5 * part) % 11
                (functional.cross_entropy(model(tokens_N), (tokens_N * 3 + 1) % 11, reduction="sum") / 12).backward()
        norms.append(float(torch.cat([parameter.grad.flatten() for parameter in parameters.values()]).norm()))  # type: ignore[union-attr]
        optimizer.step(1.0)
        model.zero_grad()
    return {"masters": {name: parameter.detach() for name, parameter in parameters.items()}, "norms": norms}


def refusals(world: Communicator) -> list[list[str]]:
    """What cannot be: local parameters of another shape than the cuts leave, a glob that no stage matches, holders that cut differently."""
    found = []
    mesh = Mesh(check_mesh(MeshConfig(pp=2), world.size), world)
    for settings in ({"buckets": (BucketConfig(name="none", match=("layer.*",)),)}, {"placement": Row(dim=mesh.coordinates["pp"])}):
        try:
            piped(world, 2, ADAMW, **settings)
        except (UsageError, DistributedError) as error:
            found.append([type(error).__name__, str(error)])
    return found


@pytest.mark.parametrize(("ranks", "stages"), [(4, 2), (3, 3)])
def test_tied_parameters_of_two_stages_are_one(ranks: int, stages: int) -> None:
    assert spawn(tied_pipelines, ranks, stages) == [[]] * ranks


def test_pipelines_that_do_not_fit_are_refused_on_every_stage() -> None:
    for glob, holders in spawn(refusals, 4):
        assert glob[0] == "UsageError" and "'layer.*' matches no parameter" in glob[1]
        assert holders[0] == "DistributedError" and "parameters that several pipeline stages have" in holders[1]


# ---------------------------------------------------------------- meshes


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, list[str]]]]:
    return {size: spawn(run_cases, size) for size in CASES}


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in CASES.items() for name in cases])
def test_a_mesh_equals_one_process(results: dict[int, list[dict[str, list[str]]]], size: int, name: str) -> None:
    assert [result[name] for result in results[size]] == [[]] * size
