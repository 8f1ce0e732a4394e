"""Models written as JSON, trained over any world by FlexShard and by one plain process, and compared at every step.

A program has blocks of parameters of any shapes, and a list of calls of these blocks: in any order, several times, from any earlier state, recomputed, nested, without
gradients, with several inputs and outputs. `compare(world, program, setting, flow)` trains it on every rank's batches with a plain copy in each process, and says
where this rank's shards of losses, gradients and parameters are not those of the copy. Everything is JSON, so that what fails can be run again as printed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import chz
import torch
from intarsia.comm import Communicator
from intarsia.config import MeshConfig, PlacementConfig
from intarsia.contracts import Box, Init, Member, Partition, Regions
from intarsia.layout import Layout
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable
from intarsia.plugins import current
from intarsia_flexshard.config import BucketConfig, FlexShardConfig
from intarsia_flexshard.runtime import FlexShard
from intarsia_placements.config import MixedRule
from intarsia_testing.layout import pack
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB = 5
RATE = 0.2


@dataclasses.dataclass
class Output:
    """A block's results in a dataclass."""

    x_BD: Tensor
    more: Any = None


class Part(nn.Module):
    """x + sum over parameters p of (tanh(x U) * p) U^T with a fixed U of p's size: whatever its shape, all of p matters to output and to x's gradient."""

    def __init__(self, dim: int, shapes: list[list[int]], frozen: list[int], unused: list[int]) -> None:
        super().__init__()
        self.unused, self.count = unused, len(shapes)
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.empty(shape), requires_grad=number not in frozen))

    def add(self, x_BD: Tensor) -> Tensor:
        """One pass over the parameters."""
        for number in range(self.count):
            if number not in self.unused:
                x_BD = x_BD + term(getattr(self, f"p{number}"), x_BD)
        return x_BD

    def forward(self, x_BD: Tensor, form: str = "tensor", inner: Any = None, c_BD: Tensor | None = None, inside: bool = False) -> Any:
        """`form` says what is returned; `inner` is another block that runs within this one; `inside` recomputes within the hooks."""
        if form == "fail":
            self.add(x_BD)
            raise ArithmeticError("on purpose")
        x_BD = x_BD if c_BD is None else x_BD * (1 + 0.1 * c_BD)
        x_BD = checkpoint(self.add, x_BD, use_reentrant=False) if inside else self.add(x_BD)
        if inner is not None:
            x_BD = x_BD + term(self.p0, inner(x_BD))
        if form == "dict":
            return {"unrelated": None, "x": [x_BD]}
        if form == "dataclass":
            return Output(x_BD, {"also": (torch.sin(x_BD),)})
        if form == "pair":
            return x_BD, c_BD
        return (torch.tanh(x_BD), torch.sin(x_BD)) if form == "two" else torch.tanh(x_BD)


def term(parameter: Tensor, x_BD: Tensor) -> Tensor:
    """See `Part`."""
    flat = parameter.reshape(-1)
    columns = torch.arange(1, flat.numel() + 1, dtype=x_BD.dtype)
    matrix_DN = torch.cos(0.7 * torch.arange(1, x_BD.shape[1] + 1, dtype=x_BD.dtype)[:, None] * columns)
    return (torch.tanh(x_BD @ matrix_DN) * flat) @ matrix_DN.t() / max(flat.numel(), 1) ** 0.5


def picked(output: Any, form: str) -> Tensor:
    """The next state from what a block returned."""
    if form == "dict":
        return output["x"][0]
    if form == "dataclass":
        return output.x_BD + output.more["also"][0]
    if form == "two":
        return output[0] + output[1]
    return output[0] if form == "pair" else output


class Program(nn.Module):
    """See the module's text. `program`: dim, embedding (bool), blocks (shapes, frozen, unused), shared ([[later, earlier] block]), ties ([[name, name]]), calls, declared
    (numbers of blocks), tied_head."""

    def __init__(self, program: Mapping[str, Any]) -> None:
        super().__init__()
        self.program, dim = program, program["dim"]
        self.embedding = nn.Embedding(VOCAB, dim) if program.get("embedding", True) else None
        self.condition = nn.Parameter(torch.empty(dim)) if any(call.get("c") for call in program["calls"]) else None
        parts = [Part(dim, block["shapes"], block.get("frozen", []), block.get("unused", [])) for block in program["blocks"]]
        for later, earlier in program.get("shared", ()):
            parts[later] = parts[earlier]
        self.blocks = nn.ModuleList(parts)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        if program.get("tied_head") and self.embedding is not None:
            self.head.weight = self.embedding.weight
        for first, second in program.get("ties", ()):
            block, name = second.rsplit(".", 1)
            setattr(self.get_submodule(block), name, self.get_parameter(first))

    def regions(self) -> Regions:
        """The declared blocks; ties as they are."""
        seen: dict[int, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            seen.setdefault(id(parameter), []).append(name)
        declared = self.program.get("declared", range(len(self.blocks)))
        return Regions(blocks=tuple(f"blocks.{n}" for n in declared), ties=tuple(tuple(names) for names in seen.values() if len(names) > 1))

    def inits(self) -> Mapping[str, Init]:
        """Normal."""
        return {name: Init("normal", std=0.5) for name, _ in self.named_parameters()}

    @property
    def head_weight_VD(self) -> nn.Parameter:
        """The loss reads it outside of every forward."""
        return self.head.weight

    def forward(self, tokens_B: Tensor, x_BD: Tensor, skip: tuple[int, ...] = (), fail: int = -1) -> Tensor:
        """Hidden states [B, D]. Calls whose number is in `skip` are left out; call number `fail` raises."""
        dtype = self.norm.weight.dtype
        x_BD = x_BD.to(dtype) if self.embedding is None else self.embedding(tokens_B) + x_BD.to(dtype)
        c_BD = None if self.condition is None else x_BD + self.condition
        states = [x_BD]
        for number, call in enumerate(self.program["calls"]):
            source = states[call["source"] % len(states)] if "source" in call else states[-1]
            if number in skip:
                continue
            how, form = call.get("how", "plain"), "fail" if number == fail else call.get("form", "tensor")
            inner = self.blocks[call["inner"]] if "inner" in call else None
            keywords: dict[str, Any] = {"form": form, "inner": inner}
            if call.get("c"):
                keywords["c_BD"] = c_BD
            block = self.blocks[call["block"]]
            if how in ("checkpoint", "reentrant") and number != fail:
                output = checkpoint(block, source, form, inner, keywords.get("c_BD"), use_reentrant=how == "reentrant")
            elif how == "no_grad":
                with torch.no_grad():
                    output = block(source, **keywords)
            else:
                output = block(source.detach() if how == "detach" else source, inside=how == "inside", **keywords)
            if call.get("form") == "pair" and c_BD is not None:
                c_BD = output[1]
            states.append(picked(output, form))
        return self.norm(sum(states[1:], states[0]) / len(states))


@dataclasses.dataclass
class Descent:
    """Gradient descent, as `intarsia.contracts.Optimizer` has it: what is compared is not blown up by a division."""

    parameters: Mapping[str, nn.Parameter]

    def step(self, factor: Any, names: Any = None) -> None:
        """p -= rate * factor * gradient."""
        for name in self.parameters if names is None else names:
            if self.parameters[name].grad is not None:
                self.parameters[name].data.sub_(self.parameters[name].grad, alpha=RATE * float(factor))


def batch(seed: int, rank: int, number: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B], input [B, D] and labels [B] of one micro-batch: one to three rows, from any of which the ranks' shares follow."""
    generator = torch.Generator().manual_seed(1000003 * seed + 1009 * rank + number)
    rows = int(torch.randint(1, 4, (), generator=generator))
    tokens_B, labels_B = (torch.randint(VOCAB, (rows,), generator=generator) for _ in range(2))
    return tokens_B, torch.randn(rows, dim, generator=generator), labels_B


def skipped(flow: Mapping[str, Any], rank: int, number: int) -> tuple[int, ...]:
    """Calls that are left out in a micro-batch, the same ones on all ranks unless `skip_ranks` names some."""
    return tuple(flow.get("skip", ())) if number in flow.get("skip_in", ()) else ()


def loss_of(model: Any, data: tuple[Tensor, Tensor, Tensor], skip: tuple[int, ...]) -> Tensor:
    """Cross-entropy, summed, over a fixed count."""
    tokens_B, x_BD, labels_B = data
    logits_BV = model(tokens_B, x_BD, skip).to(model.head.weight.dtype) @ model.head.weight.t()
    return nn.functional.cross_entropy(logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)), labels_B, reduction="sum") / 6


def plan_of(flow: Mapping[str, Any], step: int) -> tuple[int, int]:
    """(micro-batches, backward passes of each) in a step."""
    return flow.get("micro_batches", 1), 2 if flow.get("backward_twice") else 1


@dataclasses.dataclass
class Plain:
    """One process on the model's own parameters, that runs every rank's batches."""

    model: Program
    ranks: int
    flow: Mapping[str, Any]
    seed: int

    def step(self, number: int) -> tuple[float, dict[str, Tensor], dict[str, float]]:
        """Loss, gradients by name, and for each gradient the sum of the norms of its contributions."""
        parameters = dict(self.model.named_parameters())
        total = 0.0
        sums: dict[str, Tensor] = {name: torch.zeros_like(parameter) for name, parameter in parameters.items() if parameter.requires_grad}
        sizes = dict.fromkeys(sums, 0.0)
        micro_batches, passes = plan_of(self.flow, number)
        for rank in range(self.ranks):  # In the order of the runtime: a rank's micro-batches, then the ranks.
            before: dict[str, Tensor | None] = dict.fromkeys(sums)
            self.model.zero_grad()
            for micro in range(micro_batches):
                data = batch(self.seed + number, rank, micro, self.model.program["dim"])
                for _ in range(passes):
                    loss = loss_of(self.model, cast(data, self.model), skipped(self.flow, rank, micro))
                    loss.backward()
                total += loss.item()
                for name in sums:
                    gradient, last = parameters[name].grad, before[name]
                    if gradient is not None:
                        sizes[name] += (gradient if last is None else gradient - last).norm().item()
                        before[name] = gradient.clone()
            for name, gradient in before.items():
                if gradient is not None:
                    sums[name].add_(gradient)
        for name, sum_ in sums.items():
            parameters[name].data.sub_(sum_, alpha=RATE)
        return total, sums, sizes


def cast(data: tuple[Tensor, Tensor, Tensor], model: Program) -> tuple[Tensor, Tensor, Tensor]:
    """The batch in the model's dtype."""
    return data[0], data[1].to(model.norm.weight.dtype), data[2]


def build(
    world: Communicator, program: Mapping[str, Any], setting: Mapping[str, Any], sharder: Any
) -> tuple[Program, ParameterTable, Any, Mesh]:
    """Model, table, sharded model, mesh. `setting`: dtype, compute, reduce, replicate."""
    mesh = Mesh(check_mesh(MeshConfig(dp_replicate=setting.get("replicate", 1)), world.size), world)
    with torch.device("meta"):
        model = Program(program)
    dtype = setting.get("dtype", "float32")
    table = ParameterTable.from_model(model, dtype, setting.get("compute", dtype), setting.get("reduce", dtype), seed=5)
    sharded = sharder.shard(model, table, mesh, world)
    table.check(model, {name: "default" if info.trainable else "" for name, info in table.items()}, sharded)
    return model, table, sharded, mesh


def plain(program: Mapping[str, Any], table: ParameterTable, ranks: int, flow: Mapping[str, Any], seed: int) -> Plain:
    """The copy that is compared with, from the same initial values."""
    model = Program(program).to(getattr(torch, table.dtype))
    for name, parameter in model.named_parameters():
        table.fill(name, Layout.whole(tuple(parameter.shape)).local(0), parameter.detach())
    return Plain(model, ranks, flow, seed)


def train_step(
    sharded: Any, model: Program, optimizer: Any, mesh: Mesh, flow: Mapping[str, Any], seed: int, step: int
) -> tuple[float, Any]:
    """One step of this rank; (its loss, the local gradients before the update, or None where the update is inside of backward)."""
    total = 0.0
    micro_batches, passes = plan_of(flow, step)
    early = flow.get("update") == "in_backward"
    for number in range(micro_batches):
        is_last = number == micro_batches - 1
        data = cast(batch(seed + step, mesh.data_rank, number, model.program["dim"]), model)
        if flow.get("fail_in") == number:
            with contextlib.suppress(ArithmeticError):
                model(*data[:2], (), flow["fail"])
        if flow.get("evaluate") == "inside":
            with torch.no_grad():
                model(*data[:2])
        sharded.set_last_micro_batch(is_last or bool(flow.get("reduce_always")))
        scheduled = flow.get("drive") == "schedule"
        if scheduled:
            sharded.drive("schedule")
            for bucket in sharded.buckets:
                sharded.unshard(bucket.name, wait=False)
            for bucket in sharded.buckets:
                sharded.unshard(bucket.name)
        loss = loss_of(model, data, skipped(flow, mesh.data_rank, number))
        with sharded.update_in_backward(optimizer, 1.0) if early and is_last else contextlib.nullcontext():
            for again in range(passes):
                loss.backward(retain_graph=again < passes - 1)
        if scheduled:
            for bucket in reversed(sharded.buckets):
                sharded.reshard(bucket.name)
                if is_last:
                    sharded.reduce(bucket.name)
        total += loss.item()
    if flow.get("forward_only"):
        model(*cast(batch(99, mesh.data_rank, 0, model.program["dim"]), model)[:2])
    sharded.finish_gradients()
    gradients = {name: parameter.grad.clone() for name, parameter in sharded.parameters().items() if parameter.grad is not None}
    if flow.get("update", "update") in ("update", "in_backward"):
        if "depths" in flow:
            sharded.set_prefetch(flow["depths"][step % len(flow["depths"])])
        if "reshards" in flow:
            sharded.set_reshard(flow["reshards"][step % len(flow["reshards"])])
        sharded.update(optimizer, 1.0)
        sharded.zero_gradients()
    else:
        optimizer.step(1.0)
        sharded.zero_gradients()
        sharded.after_update()
    if flow.get("evaluate") == "between":
        with torch.no_grad():
            model.eval()
            model(*cast(batch(7, mesh.data_rank, 0, model.program["dim"]), model)[:2])
            model.train()
    return total, None if early else gradients


def errors(
    table: ParameterTable, local: Mapping[str, Tensor], wanted: Mapping[str, Tensor], sizes: Mapping[str, float], what: str
) -> Iterator[tuple[float, str]]:
    """(norm of the difference of this rank's part, over the size that it is measured by, what) for each tensor."""
    for name, whole in wanted.items():
        layout = table[name].layout
        assert layout is not None
        region = layout.local(table.rank_in(layout))
        mine = whole.new_empty(sum(box.numel for box in region))
        pack(whole.detach(), region, mine)
        if name not in local:
            yield (math.inf if whole.numel() and mine.numel() else 0.0), f"{what} {name}: missing"
            continue
        difference = (local[name].detach().reshape(-1).double() - mine.double()).norm().item() if mine.numel() else 0.0
        if math.isnan(difference) or difference:
            relative = difference / sizes[name] if sizes[name] else math.inf
            yield relative if relative == relative else math.inf, f"{what} {name}: error {relative:.2e}"


def compare(
    world: Communicator, program: Mapping[str, Any], setting: Mapping[str, Any], flow: Mapping[str, Any], sharder: Any
) -> dict[str, Any]:
    """{"worst": the largest relative error of any loss, gradient or parameter on any rank, "where": of what}."""
    model, table, sharded, mesh = build(world, program, setting, sharder)
    seed = flow.get("seed", 11)
    copy = plain(program, table, mesh.data_ranks, flow, seed)
    optimizer = Descent(sharded.parameters())
    found: list[tuple[float, str]] = [(0.0, "")]
    for step in range(flow.get("steps", 3)):
        mine, gradients = train_step(sharded, model, optimizer, mesh, flow, seed, step)
        loss, wanted, sizes = copy.step(step)
        total = world.all_reduce(torch.tensor(mine, dtype=torch.float64), "sum", "loss").item() / (world.size / mesh.data_ranks)
        found.append((abs(total - loss) / abs(loss), f"step {step}: loss {total} instead of {loss}"))
        if gradients is not None:
            strict = {name: gradient.norm().item() for name, gradient in wanted.items()} if flow.get("strict") else sizes
            found += errors(table, gradients, wanted, strict, f"step {step}: gradient of")
        parameters = dict(copy.model.named_parameters())
        norms = {name: max(parameter.norm().item(), 1e-30) for name, parameter in parameters.items()}
        found += errors(table, sharded.masters(), parameters, norms, f"step {step}: parameter")
        if any(error != error or error == math.inf for error, _ in found):
            break
    for group in {group for bucket in sharded.buckets for group in bucket.groups[:2] if group is not world and group.size > 1}:
        group.close()
    everyone = world.gather_json(max(found))
    worst, where = max(map(tuple, everyone))
    return {"worst": worst, "where": where}


# ---------------------------------------------------------------- settings


@chz.chz(typecheck=True)
class Odd(PlacementConfig):
    """A third party's placement."""


class OddPlacement:
    """Boxes and nothing else: every member is cut in two along each dimension, the pieces dealt out backwards by a count over the bucket; some rank has two boxes that
    do not touch, some rank none."""

    name, accepts = "odd", "box"

    def partition(self, members: Any, ranks: int) -> Partition:
        """See `intarsia.contracts.Placement`."""
        dealt, rows = 0, []
        for member in members:
            row: list[tuple[Box, ...]] = [()] * ranks
            for box in reversed(halved(member)):
                row[-1 - dealt % ranks] += (box,)
                dealt += 1
            rows.append(tuple(row))
        return Partition(tuple(members), ranks, tuple(rows))


def halved(member: Member) -> list[Box]:
    """The member's non-empty boxes after one cut along each dimension."""
    boxes = [Box.whole(member.shape)] if member.numel else []
    for dimension in range(len(member.shape)):
        found = []
        for box in boxes:
            length = box.size[dimension]
            for begin, size in ((0, (length + 1) // 2), ((length + 1) // 2, length // 2)):
                if size:
                    start, sizes = list(box.start), list(box.size)
                    start[dimension], sizes[dimension] = begin, size
                    found.append(Box(tuple(start), tuple(sizes)))
        boxes = found
    return boxes


class WithOdd:
    """The process's plugins, and `odd` beside them."""

    def build(self, config: Any, *arguments: Any) -> Any:
        """See `intarsia.plugins.Plugins.build`."""
        return OddPlacement() if isinstance(config, Odd) else current().build(config, *arguments)


def placement_of(text: str) -> PlacementConfig:
    """row, row 1, column, flat 64, owned, block 2x3, replicate, odd, or mixed."""
    name, _, argument = text.partition(" ")
    if name == "odd":
        return Odd()
    registry = current().registry("placement")
    config = {entry.name: current().config_class(entry) for entry in registry.entries()}[name]
    if name == "mixed":
        rules = tuple(MixedRule(match=f"*.p{number}", placement=placement_of(kind)) for number, kind in enumerate(argument.split(",")))
        return config(rules=rules, default=placement_of("owned"))
    if name == "block":
        return config(tile=tuple(map(int, argument.split("x"))))
    return config(**({{"flat": "unit"}.get(name, "dim"): int(argument)} if argument else {}))


def sharder_of(setting: Mapping[str, Any]) -> FlexShard:
    """FlexShard with a setting's fields; placements are words."""
    own = {"dtype", "compute", "reduce", "replicate"}
    fields = {key: value for key, value in setting.items() if key not in own}
    if "placement" in fields:
        fields["placement"] = placement_of(fields["placement"])
    buckets = []
    for bucket in fields.get("buckets", ()):
        places = {"placement": placement_of(bucket["placement"])} if bucket.get("placement") else {}
        buckets.append(
            BucketConfig(**{key: tuple(value) if isinstance(value, list) else value for key, value in {**bucket, **places}.items()})
        )
    return FlexShard(FlexShardConfig(**{**fields, "buckets": tuple(buckets)}), WithOdd())  # type: ignore[arg-type]
