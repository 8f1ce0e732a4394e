"""Scenarios of sharding that need several processes, against one process that has everybody's batches.

Numbers in brackets are those of `docs/reference/flexshard-scenarios.md`. Each function `case_...` runs in the processes and returns what is wrong; the processes of a size are
started once for all of its cases.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _scenarios import Made, Slabs, Stack, on_meta, random, shard
from _sharded import Tiny, whole_tensors
from _spawn import spawn
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.contracts import OptimizerGroup
from intarsia.errors import CheckpointError
from intarsia.plugins import current
from intarsia.train.state import ModelState
from intarsia_checkpoint_posix.storage import PosixStorage
from intarsia_flexshard import runtime
from intarsia_flexshard.config import BucketConfig
from intarsia_optimizers.config import AdamWConfig, MuonConfig, SGDConfig, SplitConfig
from intarsia_placements.config import Column, Flat, Mixed, MixedRule, Owned, Row
from intarsia_testing.stateful import OverStorage
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SGD = SGDConfig(lr=0.1, momentum=0.0)


def optimizer_of(made: Made, config: Any) -> Any:
    trained = {name: parameter for name, parameter in made.sharded.parameters().items() if parameter.requires_grad}
    return current().build(config, [OptimizerGroup("default", trained)], made.table, made.world)


def alone(make: Callable[[], nn.Module], **options: Any) -> Made:
    """The model whole in this process."""
    return shard(make(), SelfCommunicator(), whole=True, **options)


def backward(made: Made, losses: Sequence[Callable[[nn.Module], Tensor]]) -> None:
    """Micro-batches of a step, and complete gradients."""
    for number, loss in enumerate(losses):
        made.sharded.set_last_micro_batch(number == len(losses) - 1)
        loss(made.model).backward()
    made.sharded.finish_gradients()


def update(made: Made, optimizer: Any) -> None:
    """The end of a step."""
    made.sharded.update(optimizer, 1.0)
    made.sharded.zero_gradients()


def wholes(made: Made) -> dict[str, Tensor]:
    """Of a model that is whole: its values."""
    return {name: value.detach().clone() for name, value in made.sharded.parameters().items()}


# ---------------------------------------------------------------- two processes


class ReadsLater(torch.autograd.Function):
    """x W^T, whose backward reads W from the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: nn.Linear) -> Tensor:
        """W is an input too, since its gradient needs a place to go."""
        ctx.save_for_backward(x)
        ctx.module = module
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Of x and W."""
        (x,) = ctx.saved_tensors
        return gradients[0] @ ctx.module.weight, gradients[0].t() @ x, None


class TakesAll(torch.autograd.Function):
    """A layer as one function of its input and of everything that `parameters()` gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Saves them all."""
        ctx.save_for_backward(x, weight, bias)
        return (x @ weight.t() + bias).tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From what was saved."""
        x, weight, bias = ctx.saved_tensors
        inner = gradients[0] * (1 - (x @ weight.t() + bias).tanh() ** 2)
        return inner @ weight, inner.t() @ x, inner.sum(0)


class Functions(nn.Module):
    """A block of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """As wide as it came."""
        weight, bias = self.first.parameters()
        assert weight is self.first.weight and bias is self.first.bias and next(self.second.parameters()) is self.second.weight
        return x + ReadsLater.apply(TakesAll.apply(x, *self.first.parameters()), self.second.weight, self.second)


class Chain(nn.Module):
    """Blocks of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Functions() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Through all of them."""
        for layer in self.layers:
            x = layer(x)
        return x


def squares(seed: int, rows: int = 3, width: int = 8) -> Callable[[nn.Module], Tensor]:
    """A micro-batch's loss, a mean over its rows."""
    return lambda model: model(random(rows, width, seed=seed)).square().mean()


def case_functions(world: Communicator) -> list[str]:
    """[28] Backward functions that read weights from their module, and that saved them; given back in between, or not."""
    reference = alone(lambda: on_meta(Chain))
    backward(reference, [squares(rank) for rank in range(2)])
    found = []
    for reshard in ("always", "never"):
        model = on_meta(Chain)
        made = shard(model, world, blocks=[f"layers.{i}" for i in range(4)], reshard=reshard, debug=True, prefetch=0)
        backward(made, [squares(world.rank)])
        found += [f"{reshard}: {line}" for line in made.differences(reference.gradients(), made.gradients())]
        found += [f"{reshard}: {made.calls()}"] * (made.calls()["unshard layers.0"] != (2 if reshard == "always" else 1))
    return found


class Branches(nn.Module):
    """Blocks, of which the last is used if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.side = Stack(), nn.Linear(8, 8)
        self.sided = True

    def forward(self, x: Tensor) -> Tensor:
        """With or without the side."""
        x = self.stack(x)
        return x + self.side(x) if self.sided else x


def case_accumulation(world: Communicator) -> list[str]:
    """[31] Three micro-batches, the side branch used in the first two only, and not at all in the second step: nothing on the shards before the last, one reduction, totals of all; parameters that stay are gathered once
    after each update."""

    def losses(rank: int, step: int) -> list[Callable[[nn.Module], Tensor]]:
        def one(number: int) -> Callable[[nn.Module], Tensor]:
            def loss(model: nn.Module) -> Tensor:
                model.sided = number < 2 and step == 0  # type: ignore[assignment]
                return squares(10 * rank + number)(model)

            return loss

        return [one(number) for number in range(3)]

    found = []
    for reshard in ("always", "never"):
        reference, made = alone(lambda: on_meta(Branches)), None
        blocks = ["stack.layers.0", "stack.layers.1", "side"]
        made = shard(on_meta(Branches), world, blocks=blocks, reshard=reshard, prefetch=0)
        optimizers = [optimizer_of(each, SGD) for each in (reference, made)]
        before: dict[str, int] = {}
        for step in range(2):
            backward(reference, [loss for rank in range(2) for loss in losses(rank, step)])
            mine = losses(world.rank, step)
            for number, loss in enumerate(mine):
                made.sharded.set_last_micro_batch(number == 2)
                loss(made.model).backward()
                found += ["a shard has a gradient too early"] * (number < 2 and bool(made.gradients()))
            made.sharded.finish_gradients()
            nothing = {name: torch.zeros_like(value) for name, value in reference.sharded.parameters().items()}
            found += made.differences({**nothing, **reference.gradients()}, made.gradients())
            found += ["a gradient is missing"] * (len(made.gradients()) != len(nothing))
            now = made.calls()
            calls = {what: now[what] - before.get(what, 0) for what in now}
            wanted = {f"reduce {name}": 1 for name in ("root", *blocks)}
            found += [f"step {step}: {calls}"] * ({what: n for what, n in calls.items() if what.startswith("reduce")} != wanted)
            if reshard == "never":
                # In the second step the update has gathered them.
                gathers = {what: n for what, n in calls.items() if what.startswith("unshard")}
                found += [f"step {step}: {gathers}"] * (set(gathers.values()) != {1})
            before = now
            update(reference, optimizers[0])
            update(made, optimizers[1])
            found += made.differences(wholes(reference))
    return found


def case_wide_accumulation(world: Communicator) -> list[str]:
    """[31] Gradients of 256, 1 and 1 in bfloat16 are 258 in float32, and 516 over two ranks; added in bfloat16 they would be 256."""
    made = shard(on_meta(nn.Linear, 1, 2, bias=False), world, dtypes=("float32", "bfloat16", "float32"))
    backward(made, [lambda model, x=x: model(torch.tensor([[x]], dtype=torch.bfloat16)).sum() for x in (256.0, 1.0, 1.0)])
    values = made.gradients()["weight"].flatten().tolist()
    return [] if values == [516.0] and made.gradients()["weight"].dtype == torch.float32 else [str(values)]


def case_two_ranks(world: Communicator) -> list[str]:
    """[32] Five buckets; outputs are those of one process, rows halved; two micro-batches of 3 and 2 rows and SGD follow the average. With shards on the host too."""
    buckets = tuple(BucketConfig(name=f"b{i}", match=(f"layers.{i}", *(["head"] if i == 4 else []))) for i in range(5))
    found = []
    for settings in ({}, {"offload": "cpu"}, {"gradients": "sharded"}, {"reshard": "after 2"}):
        reference = alone(lambda: on_meta(Stack, 5))
        model = on_meta(Stack, 5)
        made = shard(model, world, blocks=model.blocks, buckets=buckets, reduce_op="average", **settings)
        assert len(made.sharded.buckets) == 5
        for name, whole in wholes(reference).items():
            local = made.sharded.parameters()[name]
            found += [f"{name}: {tuple(local.shape)}"] * (local.shape[0] * 2 != whole.shape[0])
        x = random(4, 8, seed=7)
        with torch.no_grad():
            found += ["the output differs"] * (not torch.allclose(made.model(x), reference.model(x), rtol=1e-6, atol=1e-6))
        optimizers = [optimizer_of(each, SGD) for each in (reference, made)]
        for step in range(3):

            def losses(rank: int, step: int = step) -> list[Callable[[nn.Module], Tensor]]:
                return [squares(100 * step + 10 * rank, 3), squares(100 * step + 10 * rank + 1, 2)]

            both = [lambda model, loss=loss: loss(model) / 2 for rank in range(2) for loss in losses(rank)]
            backward(reference, both)
            backward(made, losses(world.rank))
            for each, optimizer in zip((reference, made), optimizers, strict=True):
                update(each, optimizer)
        found += [f"{settings}: {line}" for line in made.differences(wholes(reference))]
    return found


def case_embedding(world: Communicator) -> list[str]:
    """[33] Computed in bfloat16, summed in float32: the output, and the average of what each rank has, rows that several tokens share included."""
    tokens = [torch.tensor([0, 3, 3, 5]), torch.tensor([3, 1, 5, 5])]
    made = shard(on_meta(nn.Embedding, 7, 4), world, dtypes=("float32", "bfloat16", "float32"), reduce_op="average")
    output = made.model(tokens[world.rank])
    (output * random(4, 4, seed=world.rank).bfloat16()).sum().backward()
    made.sharded.finish_gradients()
    total = torch.zeros(7, 4)
    for rank in range(2):
        part = nn.Parameter(torch.zeros(7, 4, dtype=torch.bfloat16))
        (functional.embedding(tokens[rank], part) * random(4, 4, seed=rank).bfloat16()).sum().backward()
        assert part.grad is not None
        total += part.grad.float() / 2
    found = made.differences({"weight": total}, made.gradients(), rtol=0)
    gradient = made.gradients()["weight"]
    return found + [str((output.dtype, gradient.dtype))] * ((output.dtype, gradient.dtype) != (torch.bfloat16, torch.float32))


class Recomputed(Stack):
    """Layers that are recomputed, all of them or what a policy does not save."""

    mode = "no"

    def forward(self, x: Tensor) -> Tensor:
        """Through all of them."""
        for layer in self.layers:
            if self.mode == "selective":
                x = checkpoint(layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))  # type: ignore[arg-type]
            else:
                x = layer(x) if self.mode == "no" else checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def policy(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    """Matrix products are saved."""
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def case_recomputation(world: Communicator) -> list[str]:
    """[34] Recomputed layers whose parameters are given back: numbers are those without, whatever a policy saves, and a recomputation costs no gather of its own."""
    found = []
    reference = alone(lambda: on_meta(Stack, 4))
    backward(reference, [squares(rank) for rank in range(2)])
    for mode in ("no", "all", "selective"):
        model = on_meta(Recomputed, 4)
        model.mode = mode
        made = shard(model, world, blocks=model.blocks, debug=True, prefetch=0)
        backward(made, [squares(world.rank)])
        found += [f"{mode}: {line}" for line in made.differences(reference.gradients(), made.gradients())]
        gathers = [made.calls()[f"unshard {name}"] for name in model.blocks]
        found += [f"{mode}: {gathers}"] * (gathers != [2, 2, 2, 2])
    return found


class late:
    """Whatever `Communicator.CALL` prepares starts late on rank 1 and ends late on rank 0."""

    def __init__(self, call: str, rank: int) -> None:
        self.call, self.rank, self.original = call, rank, getattr(Communicator, call)

    def __enter__(self) -> None:
        original, rank = self.original, self.rank

        def prepare(comm: Any, *arguments: Any, **named: Any) -> Any:
            made = original(comm, *arguments, **named)
            which = "start" if rank else "wait"
            call = getattr(made, which)

            def slowly(*given: Any) -> None:
                time.sleep(0.002)
                call(*given)

            setattr(made, which, slowly)
            return made

        setattr(Communicator, self.call, prepare)

    def __exit__(self, *error: object) -> None:
        setattr(Communicator, self.call, self.original)


class Scale(nn.Module):
    """A bias-free layer of one output whose input is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """y + x w."""
        return y + x * self.w.sum()


class Scales(nn.Module):
    """Gradients of 1 and 2, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(6))

    def forward(self, y: Tensor) -> Tensor:
        """Through all of them."""
        for index, layer in enumerate(self.layers):
            y = layer(torch.tensor(1.0 + index % 2), y)
        return y


def case_late(world: Communicator) -> list[str]:
    """[35] Collectives that are late, one reduction at a time or as many as there are packs for: two packs are used by all buckets in every step, and sums over two ranks are 2 and 4. A buffer is filled again only when
    its last reader is done."""
    pending, found = runtime.PENDING, []
    try:
        for runtime.PENDING in (1, 100):
            for call in ("prepare_reduce_scatter", "prepare_gather"):
                found += [f"{call}, {runtime.PENDING}: {line}" for line in run_late(world, call)]
    finally:
        runtime.PENDING = pending
    return found


def run_late(world: Communicator, call: str) -> list[str]:
    found = []
    with late(call, world.rank):
        made = shard(on_meta(Scales), world, blocks=[f"layers.{i}" for i in range(6)], debug=True, placement=Flat(unit=1))
        addresses = []
        for _ in range(3):
            made.model(torch.zeros((), requires_grad=True)).backward()
            made.sharded.finish_gradients()
            for index in range(6):
                gradient = made.gradients()[f"layers.{index}.w"]
                found += [f"{call} {index}: {gradient.tolist()}"] * (not bool((gradient == 2.0 + 2 * (index % 2)).all()))
            addresses.append([bucket.reduction.pack.buffer.data_ptr() for bucket in made.sharded.buckets])
            update(made, optimizer_of(made, SGD))
        found += [f"{call}: packs {addresses}"] * (addresses[0] != addresses[2] or len(set(addresses[0])) != 2)
    model = on_meta(Stack, 4)
    reference = alone(lambda: on_meta(Stack, 4))
    backward(reference, [squares(rank) for rank in range(2)])
    with late(call, world.rank):
        made = shard(model, world, blocks=model.blocks, debug=True)
        backward(made, [squares(world.rank)])
        found += [f"{call}: {line}" for line in made.differences(reference.gradients(), made.gradients())]
    return found


def case_uneven(world: Communicator) -> list[str]:
    """[36] Everything on one rank, and a quarter on it: AdamW's steps are those of one process, without a collective. [16] The placement is nobody's that the runtime knows."""
    found = []
    for shares, combed in (((1, 0), False), ((1, 3), False), ((2, 2), True)):
        reference, model = alone(lambda: on_meta(Stack)), on_meta(Stack)
        made = shard(model, world, blocks=model.blocks, placement=Slabs(shares=shares, combed=combed))
        config = AdamWConfig(lr=0.01, weight_decay=0.1)
        optimizers = [optimizer_of(each, config) for each in (reference, made)]
        for step in range(3):
            backward(reference, [squares(10 * step + rank) for rank in range(2)])
            backward(made, [squares(10 * step + world.rank)])
            before, all_before = made.calls(), {what: each.calls for what, each in world.stats().items()}
            optimizers[1].step(1.0)
            found += ["the optimizer communicated"] * (
                before != made.calls() or all_before != {w: e.calls for w, e in world.stats().items()}
            )
            made.sharded.zero_gradients()
            made.sharded.after_update()
            update(reference, optimizers[0])
        found += [f"{shares}: {line}" for line in made.differences(wholes(reference))]
    return found


def case_bits(world: Communicator) -> list[str]:
    """[37] The bits of `fully_shard` over gloo: odd sizes, a frozen parameter, stacks cut on dimension 1; float32 and bfloat16 computation, three ways to accumulate."""
    os.environ["INTARSIA_TEST_DEVICE"] = "cpu"
    file = Path(__file__).parents[1] / "gpu" / "test_flexshard_gpu.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    shared.join = lambda: world  # type: ignore[attr-defined]
    results = [(compute, *result) for compute in ("float32", "bfloat16") for result in shared.bits(compute)]
    assert len(results) == 6
    return [f"{compute}, {case}: {wrong}" for compute, case, wrong in results if wrong]


def case_divisors(world: Communicator) -> list[str]:
    """[38] A gradient is the sum over ranks by the divisor, for several of both and of dtypes."""
    found = []
    for dtypes in (("float32", "float32", "float32"), ("float32", "bfloat16", "float32"), ("float32", "bfloat16", "bfloat16")):
        compute = getattr(torch, dtypes[1])
        total = sum(random(3, 8, seed=rank).to(compute).sum(0).float() for rank in range(2))
        for divisor, op in ((1.0, "sum"), (2.0, "average"), (3.0, "average"), (16.0, "average")):
            settings = {"reduce_op": op, "divisor": divisor if op == "average" and divisor != 2.0 else None}
            made = shard(on_meta(nn.Linear, 8, 4, bias=False), world, dtypes=dtypes, **settings)
            x = random(3, 8, seed=world.rank).to(compute)
            backward(made, [lambda model, x=x: summed(model, x)])
            wanted = {"weight": (torch.as_tensor(total) / divisor).expand(4, 8).contiguous()}
            found += [f"{dtypes} {op} {divisor}: {line}" for line in made.differences(wanted, made.gradients(), rtol=1e-6)]
    return found


def summed(model: nn.Module, x: Tensor) -> Tensor:
    """Its gradient by the weight is the sum of the rows of x, in each row, rounded once to x's dtype."""
    return model(x.sum(0, keepdim=True)).sum()


class Attention(nn.Module):
    """Causal attention with a fused projection."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.wo = nn.Linear(16, 16, bias=False)
        if fused:
            self.wqkv = nn.Linear(16, 48, bias=False)
        else:
            self.wq, self.wk, self.wv = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, 16]."""
        q, k, v = self.wqkv(x).chunk(3, -1) if self.fused else (self.wq(x), self.wk(x), self.wv(x))
        heads = [each.unflatten(-1, (2, 8)).transpose(1, 2) for each in (q, k, v)]
        return self.wo(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Pre-norm."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(16), Attention(fused)
        self.norm2, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, 16]."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Width 16, two layers."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 16)
        self.layers = nn.ModuleList(TransformerBlock(fused) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 19, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of the next token."""
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def fuse(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values below each other."""
    found = {name: value for name, value in values.items() if not any(f".{part}." in name for part in ("wq", "wk", "wv"))}
    for name in list(values):
        if ".wq." in name:
            found[name.replace("wq", "wqkv")] = torch.cat([values[name.replace("wq", part)] for part in ("wq", "wk", "wv")])
    return found


def muon_of(made: Made, newton_schulz_dtype: str) -> Any:
    """Muon for the layers' matrices, AdamW for the rest, embedding and head included."""
    split = (SplitConfig(match=("*.wqkv.weight",), blocks=3),)
    config = MuonConfig(
        lr=1e-3,
        weight_decay=0.05,
        adjust="match_rms_adamw",
        adamw_lr=0.01,
        adamw_weight_decay=0.03,
        split=split,
        newton_schulz_dtype=newton_schulz_dtype,
    )
    return optimizer_of(made, config)


def torch_muon(start: Mapping[str, Tensor], tokens: Sequence[Sequence[Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and momentum after training with torch's optimizers, Q, K and V apart, put below each other."""
    separate = Transformer(fused=False)
    named = dict(separate.named_parameters())
    with torch.no_grad():
        for name, parameter in named.items():
            part = next((i for i, letter in enumerate("qkv") if f".w{letter}." in name), None)
            whole = start[name] if part is None else start[name.replace(f"w{'qkv'[part]}", "wqkv")][16 * part : 16 * part + 16]
            parameter.copy_(whole)
    matrices = [name for name, parameter in named.items() if parameter.dim() == 2 and "embedding" not in name and "head" not in name]
    theirs = [
        torch.optim.Muon([named[name] for name in matrices], lr=1e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([named[name] for name in named if name not in matrices], lr=0.01, betas=(0.9, 0.95), weight_decay=0.03),
    ]
    for ranks in tokens:
        for each in ranks:
            (separate(each) / len(ranks)).backward()
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    momentum = {name: theirs[0].state[named[name]]["momentum_buffer"] for name in matrices}
    return fuse({name: value.detach() for name, value in named.items()}), fuse(momentum)


def case_muon(world: Communicator) -> list[str]:
    """[41] Three steps of a transformer, whole matrices on their owners, without a collective or a group in the step: `torch.optim.Muon` and AdamW in one process with Q, K and V
    apart give the same but for the rounding of bfloat16, and our own Muon in one process to that of float32."""
    tokens = [
        [torch.randint(19, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(2)] for step in range(3)
    ]
    found = []
    for precision in ("bfloat16", "float32"):
        one = alone(lambda: on_meta(Transformer))
        start, one_muon = wholes(one), muon_of(one, precision)
        for ranks in tokens:
            backward(one, [lambda model, each=each: model(each) / 2 for each in ranks])
            update(one, one_muon)
        made = shard(
            on_meta(Transformer), world, blocks=["layers.0", "layers.1"], placement=Owned(), owners="newton_schulz", reduce_op="average"
        )
        before = len(torch.distributed.distributed_c10d._world.pg_map)
        ours = muon_of(made, precision)
        for ranks in tokens:
            backward(made, [lambda model, ranks=ranks: model(ranks[world.rank])])
            calls, told = made.calls(), {what: each.calls for what, each in world.stats().items()}
            ours.step(1.0)
            found += ["Muon communicated"] * (calls != made.calls() or told != {what: each.calls for what, each in world.stats().items()})
            made.sharded.zero_gradients()
            made.sharded.after_update()
        found += ["a process group was made"] * (len(torch.distributed.distributed_c10d._world.pg_map) != before)
        parameters, momentum = torch_muon(start, tokens)
        if precision == "float32":
            found += made.differences(wholes(one), rtol=1e-5)
            continue
        for name, value in made.sharded.masters().items():
            wanted, moved = made.local(name, parameters[name]), made.local(name, parameters[name] - start[name])
            mine = value.detach().flatten()
            close = torch.allclose(mine, wanted, atol=2e-4, rtol=3e-4) and float((mine - wanted).norm()) <= 0.2 * float(moved.norm())
            found += [f"{name}: {float((mine - wanted).norm())} off after moving {float(moved.norm())}"] * (not close)
            if name in momentum:
                slot = ours.slots()[name]["momentum"].flatten()
                found += [f"momentum of {name}"] * (not torch.allclose(slot, made.local(name, momentum[name]), atol=3e-6, rtol=5e-4))
        owned = [name for name in momentum if made.sharded.parameters()[name].numel()]
        found += [f"owns {owned}"] * (not 0 < len(owned) < len(momentum))
    return found


def case_state(world: Communicator) -> list[str]:
    """[18] Saved, overwritten and loaded, under recomputation: values are back, and a tie is still one parameter. [42] The state goes into a second model with other initial values and
    another placement, which then is the first one's equal, a step of SGD later too; into a model of another width it does not go, and nothing is changed."""
    folder = world.gather_json(tempfile.mkdtemp(prefix="scenario-"), "folder")[0]
    manager = OverStorage(PosixStorage(folder), world, {"mesh": {"dp_shard": world.size}})
    options: dict[str, Any] = {"blocks": tuple(f"blocks.{i}" for i in range(3)), "ties": (("embedding.weight", "head.weight"),)}
    made = shard(on_meta(Tiny, True, True), world, **options)
    states = [ModelState(made.model, made.sharded, made.table)]
    kept = {name: value.clone() for name, value in made.sharded.masters().items()}
    manager.save(1, states)
    manager.wait()
    for parameter in made.sharded.parameters().values():
        parameter.data.fill_(-1)
    made.sharded.after_update()
    manager.load(manager.latest(), states)
    found = [name for name, value in made.sharded.masters().items() if not torch.equal(value, kept[name]) or value.eq(-1).any()]
    found += ["the tie is lost"] * (made.model.head.weight is not made.model.embedding.weight)
    second = shard(on_meta(Tiny, True, True), world, seed=11, placement=Flat(unit=1), reshard="never", **options)
    tokens = torch.arange(10).view(2, 5).roll(world.rank) % 5

    def output(each: Made) -> Tensor:
        return each.model(tokens, True) @ each.model.head.weight.t()

    found += ["the second model starts equal"] * torch.equal(output(made), output(second))
    made.sharded.zero_gradients()
    second.sharded.zero_gradients()
    manager.load(manager.latest(), [ModelState(second.model, second.sharded, second.table)])
    found += ["outputs differ after loading"] * (not torch.equal(output(made), output(second)))
    for each in (made, second):
        backward(each, [lambda model, each=each: functional.cross_entropy(output(each).flatten(0, 1), tokens.flatten())])
        update(each, optimizer_of(each, SGD))
    one, other = (whole_tensors(world, each.table, each.sharded.masters()) for each in (made, second))
    found += [
        f"{name} differs after a step" for name in one if not torch.allclose(torch.tensor(one[name]), torch.tensor(other[name]), rtol=1e-6)
    ]
    found += ["outputs differ after a step"] * (not torch.allclose(output(made), output(second), rtol=1e-6, atol=1e-6))
    small, wide = (shard(on_meta(Stack, 2, dim), world, blocks=["layers.0", "layers.1"], seed=dim) for dim in (8, 16))
    manager.save(2, [ModelState(small.model, small.sharded, small.table)])
    manager.wait()
    before = {name: value.clone() for name, value in wide.sharded.masters().items()}
    try:
        manager.load(manager.latest(), [ModelState(wide.model, wide.sharded, wide.table)])
        found.append("a model of another width was loaded")
    except CheckpointError as error:
        found += [str(error)] * ("layers.0.up.weight" not in str(error) or "[12, 8]" not in str(error).replace("(", "[").replace(")", "]"))
    found += [f"{name} was changed" for name, value in wide.sharded.masters().items() if not torch.equal(value, before[name])]
    manager.close()
    world.barrier("the folder has been read")
    if world.rank == 0:
        shutil.rmtree(folder)
    return found


# ---------------------------------------------------------------- four processes


class Exchanged(torch.autograd.Function):
    """Rows to the ranks of a group; gradients the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], comm: Communicator) -> Tensor:
        """`sent` rows to each rank, in order; `received` from each."""
        ctx.facts = sent, received, comm
        return exchange_rows(x, sent, received, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """The other way."""
        sent, received, comm = ctx.facts
        return exchange_rows(gradients[0], received, sent, comm), None, None, None


def exchange_rows(x: Tensor, sent: list[int], received: list[int], comm: Communicator) -> Tensor:
    width = x.shape[1]
    parts = comm.exchange([part.contiguous().view(-1) for part in x.split(sent)], [rows * width for rows in received], "tokens")
    return torch.cat([part.view(-1, width) for part in parts])


class Experts(nn.Module):
    """A stack of matrices, of which this process has some; tokens travel to theirs and back."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, 8, 8))
        self.comm: Communicator = SelfCommunicator()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [T, 8], ids [T] the number of each token's expert."""
        order = ids.argsort(stable=True)
        sent = torch.bincount(ids // len(self.weight), minlength=self.comm.size)
        received = torch.cat(self.comm.exchange(list(sent.split(1)), [1] * self.comm.size, "counts"))
        there = exchange_rows(ids[order][:, None], sent.tolist(), received.tolist(), self.comm).flatten() % len(self.weight)
        arrived = Exchanged.apply(x[order], sent.tolist(), received.tolist(), self.comm)
        done = torch.einsum("td,tdh->th", arrived, self.weight[there]).tanh()
        back = Exchanged.apply(done, received.tolist(), sent.tolist(), self.comm)
        return back[order.argsort()]


class Mixture(nn.Module):
    """x + gate(x) * experts(x), twice."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixtureLayer(count) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """[T, 8]."""
        for layer in self.layers:
            x = layer(x, ids)
        return self.head(x)


class MixtureLayer(nn.Module):
    """Dense gate, experts."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 1), Experts(count)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """[T, 8]."""
        return x + self.gate(x).sigmoid() * self.experts(x, ids)


def tokens_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Six tokens and their experts, unevenly many for each."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 8, generator=generator), (torch.rand(6, generator=generator) ** 2 * 4).long()


def case4_experts(world: Communicator) -> list[str]:
    """[38] Four experts over ep 2, each half cut over ep_shard 2, the rest over all four ranks, tokens exchanged in forward and in backward: three steps of SGD are those of one process.
    Once with sums and a loss divided by the number of all tokens, once with averages, where experts are divided by the number of dense ranks too."""
    by_row = current().build(Row())
    found = []
    for convention in ("sum", "average"):
        reference = alone(lambda: on_meta(Mixture, 4))
        model = on_meta(Mixture, 2)
        divisor = 4.0 if convention == "average" else None
        buckets = tuple(
            BucketConfig(name=f"experts {i}", match=(f"layers.{i}.experts",), axes=("ep_shard",), divisor=divisor, placement=Row(dim=1))
            for i in range(2)
        )
        outer = {f"layers.{i}.experts.weight": ((4, 8, 8), (("ep", 2, by_row),)) for i in range(2)}
        made = shard(
            model, world, mesh={"ep": 2}, blocks=["layers.0", "layers.1"], buckets=buckets, outer=outer, reduce_op=convention, debug=True
        )
        for layer in model.layers:
            layer.experts.comm = made.mesh.comm("ep")
        assert {tuple(p.shape) for n, p in made.sharded.parameters().items() if "experts" in n} == {(2, 4, 8)}
        optimizers = [optimizer_of(each, SGD) for each in (reference, made)]
        for step in range(3):
            backward(
                reference, [lambda model, rank=rank, step=step: model(*tokens_of(step, rank)).square().sum() / 24 for rank in range(4)]
            )
            scale = 24 if convention == "sum" else 6
            backward(made, [lambda model, step=step, scale=scale: model(*tokens_of(step, world.rank)).square().sum() / scale])
            found += [f"{convention} {step}: {line}" for line in made.differences(reference.gradients(), made.gradients())]
            norms = [float(each.table.norm(each.gradients(), each.world)) for each in (reference, made)]
            found += [f"{convention} {step}: norms {norms}"] * (abs(norms[0] / norms[1] - 1) > 1e-5)
            for each, optimizer in zip((reference, made), optimizers, strict=True):
                update(each, optimizer)
        found += [f"{convention}: {line}" for line in made.differences(wholes(reference))]
    exchanges = made.mesh.comm("ep").stats()["tokens"]
    return found + ["no token travelled"] * (exchanges.calls < 3 * 9 or exchanges.bytes == 0)


class SumsGradients(torch.autograd.Function):
    """What every rank of the group reads: gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """x."""
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The sum."""
        return ctx.comm.all_reduce(gradients[0].clone(), "sum", "gradient of the input"), None


class Sums(torch.autograd.Function):
    """The sum over the group; each rank's gradient is the sum's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """The sum."""
        return comm.all_reduce(x.clone(), "sum", "output")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """As it comes."""
        return gradients[0], None


class Sliced(nn.Module):
    """x + down(gelu(up(norm x))) + after, of whose hidden units this process has `hidden`. Gradients of what is not cut are partial sums over the processes."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, hidden), nn.Linear(hidden, 8, bias=False)
        self.after = nn.Parameter(torch.empty(8))
        self.comm: Communicator = SelfCommunicator()

    def forward(self, x: Tensor) -> Tensor:
        """[B, 8]."""
        y = functional.gelu(self.up(self.norm(SumsGradients.apply(x, self.comm))))
        return x + Sums.apply(self.down(y) + self.after / self.comm.size, self.comm)


class SlicedStack(nn.Module):
    """Two of them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sliced(hidden) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 8]."""
        for layer in self.layers:
            x = layer(x)
        return x


def case4_tensor_parallel(world: Communicator) -> list[str]:
    """[38] Columns and rows cut over tp 2, what is left cut again over dp_shard 2, what they leave whole over both: gradients, their norm and three steps are those of one process."""
    by_row, by_column = (current().build(config) for config in (Row(), Column()))
    # The world's neighbours; 13 hidden units are 7 and 6.
    tp, found = world.rank % 2, []
    rules = (MixedRule(match="*.up.*", placement=Owned()),)
    for config in (Row(), Flat(unit=1), Owned(), Mixed(rules=rules, default=Row(dim=-1))):
        reference, model = alone(lambda: on_meta(SlicedStack, 13)), on_meta(SlicedStack, 7 - tp)
        outer: dict[str, Any] = {}
        for i in range(2):
            outer[f"layers.{i}.up.weight"] = ((13, 8), (("tp", 2, by_row),))
            outer[f"layers.{i}.up.bias"] = ((13,), (("tp", 2, by_row),))
            outer[f"layers.{i}.down.weight"] = ((8, 13), (("tp", 2, by_column),))
            outer[f"layers.{i}.norm.weight"] = ((8,), (("tp", 2, "replicate"),))
        made = shard(model, world, mesh={"tp": 2}, blocks=["layers.0", "layers.1"], outer=outer, placement=config, debug=True)
        for layer in model.layers:
            layer.comm = made.mesh.comm("tp")
        optimizers = [optimizer_of(each, SGD) for each in (reference, made)]
        for step in range(3):
            backward(reference, [squares(10 * step + rank) for rank in range(2)])
            backward(made, [squares(10 * step + made.mesh.data_rank)])
            found += [f"{config} {step}: {line}" for line in made.differences(reference.gradients(), made.gradients())]
            norms = [float(each.table.norm(each.gradients(), each.world)) for each in (reference, made)]
            found += [f"{config} {step}: norms {norms}"] * (abs(norms[0] / norms[1] - 1) > 1e-5)
            for each, optimizer in zip((reference, made), optimizers, strict=True):
                update(each, optimizer)
        found += [f"{config}: {line}" for line in made.differences(wholes(reference))]
    return found


# ---------------------------------------------------------------- the tests

TWO = {name.removeprefix("case_"): value for name, value in list(globals().items()) if name.startswith("case_")}
FOUR = {name.removeprefix("case4_"): value for name, value in list(globals().items()) if name.startswith("case4_")}


def run_cases(world: Communicator, cases: Mapping[str, Callable[[Communicator], list[str]]]) -> dict[str, list[str]]:
    """What is wrong, by case; a case that ends in an error says so."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = case(world)
        except Exception:
            found[name] = [traceback.format_exc()]
    return found


def on_two(world: Communicator) -> dict[str, list[str]]:
    return run_cases(world, TWO)


def on_four(world: Communicator) -> dict[str, list[str]]:
    return run_cases(world, FOUR)


@pytest.fixture(scope="module")
def two() -> list[dict[str, list[str]]]:
    return spawn(on_two, 2)


@pytest.fixture(scope="module")
def four() -> list[dict[str, list[str]]]:
    return spawn(on_four, 4)


@pytest.mark.parametrize("name", list(TWO))
def test_on_two(two: list[dict[str, list[str]]], name: str) -> None:
    assert [result[name] for result in two] == [[]] * 2


@pytest.mark.parametrize("name", list(FOUR))
def test_on_four(four: list[dict[str, list[str]]], name: str) -> None:
    assert [result[name] for result in four] == [[]] * 4
