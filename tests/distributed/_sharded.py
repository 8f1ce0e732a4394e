"""A tiny model with everything that makes sharding hard, and a training loop over any communicator and sharder; used by the tests of sharders."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.config import MeshConfig, PlacementConfig
from intarsia.contracts import Init, Regions
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable
from intarsia_testing.layout import unpack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

VOCAB, DIM, HIDDEN, ROWS, TOKENS = 5, 7, 9, 8, 6


class Block(nn.Module):
    """x + B gelu(A x), with a bias, a scale of one element, and a branch that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.scale = nn.Parameter(torch.empty(1))
        self.side = nn.Parameter(torch.empty(DIM))

    def forward(self, x_BSD: Tensor, side: bool) -> dict[str, Tensor]:
        """In a dict, as blocks with several results have it."""
        y_BSD = self.down(nn.functional.gelu(self.up(x_BSD))) * self.scale
        return {"x": x_BSD + (y_BSD * self.side if side else y_BSD)}


class Tiny(nn.Module):
    """Embedding, blocks (the first one called twice), norm, head."""

    def __init__(self, tied: bool = False, recompute: bool = False, twice: bool = True) -> None:
        super().__init__()
        self.tied, self.recompute, self.twice = tied, recompute, twice
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.empty(DIM), persistent=False)

    def fill_buffers(self) -> None:
        """Not persistent, so made anew."""
        self.table.copy_(torch.linspace(0, 1, DIM))

    def regions(self) -> Regions:
        """Three blocks."""
        ties = (("embedding.weight", "head.weight"),) if self.tied else ()
        return Regions(blocks=tuple(f"blocks.{i}" for i in range(3)), ties=ties)

    def inits(self) -> Mapping[str, Init]:
        """Normal, but for the norm."""
        inits = {name: Init("normal", std=0.3) for name, _ in self.named_parameters()}
        return {**inits, "norm.weight": Init("ones"), "norm.bias": Init("zeros"), "blocks.1.scale": Init("constant", value=0.5)}

    def forward(self, tokens_BS: Tensor, side: bool) -> Tensor:
        """Hidden states [B, S, D]."""
        x_BSD = self.embedding(tokens_BS) + self.table.to(self.embedding.weight.dtype)
        for block in (*self.blocks, self.blocks[0]) if self.twice else self.blocks:
            if self.recompute:
                # To the block's end, not only to the last tensor that backward needs: the hooks after it see a recomputation too.
                with set_checkpoint_early_stop(False):
                    x_BSD = checkpoint(block, x_BSD, side, use_reentrant=False)["x"]
            else:
                x_BSD = block(x_BSD, side)["x"]
        return self.norm(x_BSD)


def make(world: Communicator, option: Mapping[str, Any], sharder: Any) -> tuple[Tiny, ParameterTable, Any, Mesh]:
    """Model, table, sharded model and mesh for `option`."""
    mesh = Mesh(check_mesh(MeshConfig(dp_replicate=option.get("replicate", 1)), world.size), world)
    with torch.device("meta"):
        model = Tiny(option.get("tied", False), option.get("recompute", False), option.get("twice", True))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(prefix) for prefix in option.get("frozen", ())))
    compute = option.get("compute", "float32")
    table = ParameterTable.from_model(model, "float32", compute, option.get("reduce", "float32"), seed=3)
    sharded = sharder.shard(model, table, mesh, world)
    groups = {name: "default" if info.trainable else "" for name, info in table.items()}
    table.check(model, groups, sharded)
    if option.get("compile"):
        for block in model.blocks:
            block.compile(backend=option["compile"])
    return model, table, sharded, mesh


def batches(step: int, mesh: Mesh, micro_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches of a global batch; the same number everywhere, the last ones may have no rows."""
    generator = torch.Generator().manual_seed(step)
    tokens_BS = torch.randint(VOCAB, (ROWS, TOKENS + 1), generator=generator)
    mine = tokens_BS[mesh.data_rank :: mesh.data_ranks]
    rows = math.ceil(math.ceil(ROWS / mesh.data_ranks) / micro_batches)
    for number in range(micro_batches):
        part = mine[number * rows : (number + 1) * rows]
        yield part[:, :-1], part[:, 1:]


def train(world: Communicator, option: Mapping[str, Any], sharder: Any, steps: int = 3) -> dict[str, Any]:
    """Losses, norms (2, 3 and inf), and on rank 0 the last step's gradients and the final parameters, whole."""
    model, table, sharded, mesh = make(world, option, sharder)
    parameters = sharded.parameters()
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)
    micro_batches = option.get("micro_batches", 1)
    side = mesh.data_rank in option.get("side_on", range(world.size))
    result: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for number, (tokens_BS, labels_BS) in enumerate(batches(step, mesh, micro_batches)):
            sharded.set_last_micro_batch(number == micro_batches - 1 or option.get("reduce_always", False))
            hidden_BSD = model(tokens_BS, side)
            logits_NV = (hidden_BSD @ model.head.weight.t()).float().view(-1, VOCAB)
            loss = nn.functional.cross_entropy(logits_NV, labels_BS.reshape(-1), reduction="sum") / (ROWS * TOKENS)
            loss.backward()
            total += loss.detach().double()
        sharded.finish_gradients()
        gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        result["losses"].append(world.all_reduce(total, "sum", "loss").item())
        result["norms"].append([table.norm(gradients, world, p).item() for p in (2.0, 3.0, math.inf)])
        if step == steps - 1:
            result["gradients"] = whole_tensors(world, table, gradients)
        optimizer.step()
        sharded.zero_gradients()
        sharded.after_update()
        with torch.no_grad() if option.get("evaluate") else contextlib.nullcontext():
            if option.get("evaluate"):
                result.setdefault("evaluation", []).append(model(torch.arange(VOCAB).view(1, -1), True).double().sum().item())
    result["parameters"] = whole_tensors(world, table, {name: parameter.detach() for name, parameter in parameters.items()})
    return result


def whole_tensors(world: Communicator, table: ParameterTable, local: Mapping[str, Tensor]) -> dict[str, Any]:
    """Each tensor put together from all ranks, as nested lists."""
    layouts = {name: table[name].layout for name in local}
    everyone = world.gather_json({name: [table.rank_in(layouts[name]), tensor.reshape(-1).tolist()] for name, tensor in local.items()})
    found = {}
    for name, layout in layouts.items():
        assert layout is not None
        full = torch.full(layout.shape, math.nan)
        for rank, values in (parts[name] for parts in everyone):
            unpack(torch.tensor(values, dtype=torch.float32), layout.local(rank), full)
        found[name] = full.tolist()
    return found


def placements() -> dict[str, PlacementConfig]:
    """Every installed placement with its default settings (tiles as small as the test's tensors need), and rows cut on dimension 1."""
    from intarsia.plugins import current

    registry = current().registry("placement")
    configs = {entry.name: current().config_class(entry) for entry in registry.entries()}
    small = {"block": {"tile": (2, 3)}}
    return {name: config(**small.get(name, {})) for name, config in configs.items()}
