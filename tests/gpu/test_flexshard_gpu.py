"""FlexShard on two GPUs: the bits of `fully_shard`, graph capture, delayed streams, the copy engines, compiled blocks, and two processes against one.

    pytest -m gpu tests/gpu/test_flexshard_gpu.py -v --junitxml=flexshard-gpu.xml         # what the recorded output is
    INTARSIA_TEST_DEVICE=cpu pytest -m gpu tests/gpu/test_flexshard_gpu.py                # the tests themselves, over gloo

Each test starts two processes. Sizes are odd (13, 27), one parameter is frozen, and stacks of matrices are cut on dimension 1. Without a GPU only the tests that
say nothing of CUDA run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _sharded import whole_tensors
from _spawn import spawn
from intarsia import ops
from intarsia.comm import Communicator, SelfCommunicator, init_world
from intarsia.config import MeshConfig
from intarsia.contracts import Init, OptimizerGroup, Regions
from intarsia.mesh import Mesh, check_mesh
from intarsia.ops import gradients
from intarsia.parameters import ParameterTable
from intarsia.plugins import current
from intarsia_flexshard.config import BucketConfig, FlexShardConfig
from intarsia_flexshard.recorded import Recorded
from intarsia_flexshard.runtime import build as build_flexshard
from intarsia_optimizers.config import AdamWConfig
from intarsia_placements.config import Flat, Row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("INTARSIA_TEST_DEVICE", "cuda")
needs_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="there is nothing to capture, and no copy engine")
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "INTARSIA_TEST_DEVICE": DEVICE,
}
VOCAB, STEPS = 13, 3


# ---------------------------------------------------------------- the model


class ReadsLater(torch.autograd.Function):
    """x W^T by a module whose weight is read again in backward, from the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: nn.Linear) -> Tensor:
        """The weight is an input too, so that its gradient has a place to go."""
        ctx.save_for_backward(x)
        ctx.module = module
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,), grad = ctx.saved_tensors, gradients[0]
        return grad @ ctx.module.weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class Block(nn.Module):
    """x + D gelu(U norm x) + a stack of matrices. `pause` is called in forward and in backward."""

    def __init__(self, dim: int, hidden: int, custom: bool) -> None:
        super().__init__()
        self.custom = custom
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 8, dim))
        self.pause: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The stream after this block."""
        if self.pause is not None:
            self.pause()
        # The bias apart: which kernel multiplies and adds in one may depend on where the weight lies.
        y = F.gelu(ops.linear(self.norm(x), self.up.weight) + self.up.bias)
        y = ReadsLater.apply(y, self.down.weight, self.down) if self.custom else ops.linear(y, self.down.weight)
        z = torch.einsum("bsd,ehd->bseh", x, self.experts).tanh()
        x = x + y + torch.einsum("bseh,ehd->bsd", z, self.experts)
        if self.pause is not None and x.requires_grad:
            x.register_hook(lambda gradient: self.pause() if self.pause is not None else None)
        return x


class Odd(nn.Module):
    """Embedding, blocks, head with the loss inside."""

    def __init__(self, option: Mapping[str, Any]) -> None:
        super().__init__()
        dim, hidden = option.get("dim", 13), option.get("hidden", 27)
        self.recompute, self.twice = option.get("recompute", False), option.get("twice", False)
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden, option.get("custom", False)) for _ in range(option.get("layers", 3)))
        self.head = Head(dim)
        if option.get("frozen", True):
            self.blocks[1].up.weight.requires_grad_(False)
            self.blocks[2].norm.weight.requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy."""
        x = self.embedding(tokens)
        for block in (*self.blocks, self.blocks[0]) if self.twice else self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x, labels)

    def regions(self) -> Regions:
        """The blocks."""
        return Regions(blocks=tuple(f"blocks.{index}" for index in range(len(self.blocks))))

    def inits(self) -> Mapping[str, Init]:
        """Normal but for vectors."""
        return {name: Init("ones") if p.dim() < 2 else Init("normal", std=0.2) for name, p in self.named_parameters()}


class Head(nn.Linear):
    """Projection and loss."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, VOCAB, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        """In float32."""
        return F.cross_entropy(F.linear(x, self.weight).flatten(0, 1).float(), labels.flatten())


def batch(step: int, rank: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and labels."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(VOCAB, (rows, 12), generator=generator).to(device())
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# ---------------------------------------------------------------- processes


def device() -> torch.device:
    """This process's."""
    return torch.device(DEVICE, int(os.environ.get("RANK", 0))) if DEVICE == "cuda" else torch.device("cpu")


def join() -> Communicator:
    """The world of this test's processes."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    return init_world(device(), 300.0)


def on_two(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function` returns on both ranks."""
    return spawn(function, 2, *arguments, world=False, environment=ENVIRONMENT)


class TorchAdamW:
    """One `torch.optim.AdamW` for each parameter, for both runtimes: the same arithmetic on whatever part of it is here."""

    updates_split_masters = False

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}
        self._optimizers = {name: torch.optim.AdamW([p], **options) for name, p in parameters.items() if p.requires_grad}

    def step(self, factor: float, names: Sequence[str] | None = None) -> None:
        """See `intarsia.contracts.Optimizer`."""
        for name in self._optimizers if names is None else names:
            self._optimizers[name].step()

    def zero(self) -> None:
        """Forget gradients."""
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)


def shard(option: Mapping[str, Any], comm: Communicator, **settings: Any) -> tuple[Odd, ParameterTable, Any]:
    """Model, table and sharded model."""
    with torch.device("meta"):
        model = Odd(option)
    table = ParameterTable.from_model(
        model, "float32", option.get("compute", "float32"), option.get("reduce", "float32"), seed=option.get("seed", 3)
    )
    config = FlexShardConfig(**{"reduce_op": "average", **settings})
    sharded = build_flexshard(config).shard(model, table, Mesh(check_mesh(MeshConfig(), comm.size), comm), comm)
    for name, info in table.items():
        assert info.bucket and info.layout is not None, name
    if option.get("compile"):
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend=option["compile"], dynamic=False)
    return model, table, sharded


def ours_optimizer(table: ParameterTable, sharded: Any, comm: Communicator) -> Any:
    """AdamW of `intarsia_optimizers` over everything that trains."""
    trained = {name: parameter for name, parameter in sharded.parameters().items() if parameter.requires_grad}
    return current().build(AdamWConfig(lr=1e-2, weight_decay=0.1), [OptimizerGroup("all", trained)], table, comm)


def train(
    model: Odd, sharded: Any, optimizer: Any, batches: Sequence[Sequence[tuple[Tensor, Tensor]]], mode: str = "last", factor: Any = 1.0
) -> list[Tensor]:
    """Losses of each micro-batch; `batches` by step and micro-batch. `mode`: gradients are reduced after the last micro-batch, or after each."""
    losses = []
    for micro_batches in batches:
        for number, (tokens, labels) in enumerate(micro_batches):
            sharded.set_last_micro_batch(mode == "each" or number == len(micro_batches) - 1)
            loss = model(tokens, labels)
            (loss / len(micro_batches)).backward()
            losses.append(loss.detach().clone())
            if mode == "each":
                # What backward leaves on the root, whose end no module call tells, is reduced as well.
                sharded.finish_gradients()
        sharded.finish_gradients()
        sharded.update(optimizer, factor)
        sharded.zero_gradients()
    return losses


def masters(world: Communicator, table: ParameterTable, sharded: Any) -> dict[str, Any]:
    """Whole master values as nested lists."""
    return whole_tensors(world, table, {name: value.float().cpu() for name, value in sharded.masters().items()})


def unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names whose bits differ."""
    return [name for name in one if not torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name]))]


# ---------------------------------------------------------------- the bits of fully_shard


def stacked_buckets(layers: int = 3) -> tuple[BucketConfig, ...]:
    """The stacks of each block, cut on dimension 1."""
    return tuple(BucketConfig(name=f"stack {i}", match=(f"blocks.{i}.experts",), placement=Row(dim=1)) for i in range(layers))


def opponent(option: Mapping[str, Any], values: Mapping[str, Any], divisor: float | None) -> nn.Module:
    """The same model under `fully_shard`, with the whole initial `values`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(DEVICE, (2,))
    with torch.device("meta"):
        model = Odd(option)
    compute, reduce = (getattr(torch, option[key]) for key in ("compute", "reduce"))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(compute, reduce)}
    for block in model.blocks:
        fully_shard(block, **options, shard_placement_fn=lambda p: Shard(1) if p.dim() == 3 else Shard(0))
    for module in (model.embedding, model.head, model):
        fully_shard(module, **options)
    model.to_empty(device=device())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = torch.tensor(values[name], device=device())
            parameter.to_local().copy_(distribute_tensor(whole, mesh, parameter.placements).to_local())
    for module in model.modules():
        if isinstance(module, FSDPModule) and divisor is not None:
            module.set_gradient_divide_factor(divisor)
    return model


def train_opponent(model: nn.Module, batches: Sequence[Any], mode: str) -> list[Tensor]:
    """As `train`."""
    optimizer = TorchAdamW(dict(model.named_parameters()))
    losses = []
    for micro_batches in batches:
        for number, (tokens, labels) in enumerate(micro_batches):
            model.set_requires_gradient_sync(mode == "each" or number == len(micro_batches) - 1)  # type: ignore[operator]
            loss = model(tokens, labels)
            (loss / len(micro_batches)).backward()
            losses.append(loss.detach().clone())
        optimizer.step(1.0)
        optimizer.zero()
    return losses


def bits(compute: str) -> list[Any]:
    """[case, what differs] for each divisor and way to accumulate."""
    world, found = join(), []
    # gloo has no scaled sums, which fully_shard takes for other divisors than the number of ranks.
    for divisor in (None, 4.0) if DEVICE == "cuda" else (None,):
        for micro_batches, mode in ((1, "last"), (3, "last"), (3, "each")):
            option = {"compute": compute, "reduce": "float32"}
            batches = [[batch(10 * step + number, world.rank) for number in range(micro_batches)] for step in range(STEPS)]
            model, table, sharded = shard(option, world, placement=Row(), buckets=stacked_buckets(), divisor=divisor)
            other = opponent(option, masters(world, table, sharded), divisor)
            losses = train(model, sharded, TorchAdamW(sharded.parameters()), batches, mode)
            theirs = train_opponent(other, batches, mode)
            whole = {name: parameter.full_tensor().cpu() for name, parameter in other.named_parameters()}  # type: ignore[operator]
            wrong = unequal(masters(world, table, sharded), whole)
            wrong += [f"loss {index}" for index, pair in enumerate(zip(losses, theirs, strict=True)) if not torch.equal(*pair)]
            assert len({loss.item() for loss in losses}) > 1
            found.append([f"divisor {divisor}, {micro_batches} micro-batches, reduced at {mode}", wrong])
    return found


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_bits_of_fully_shard(compute: str, record_property: Any) -> None:
    results = on_two(bits, compute)
    record_property("cases", [case for case, _ in results[0]])
    for result in results:
        assert [case for case in result if case[1]] == []


# ---------------------------------------------------------------- two processes equal one


OPTIONS: dict[str, dict[str, Any]] = {
    "row": {},
    "column": {"placement": "column"},
    "flat": {"placement": "flat"},
    "owned": {"placement": "owned"},
    "block": {"placement": "block"},
    "never": {"reshard": "never"},
    "after 2": {"reshard": "after 2", "layers": 5},
    "no prefetch": {"prefetch": 0},
    "prefetch 2": {"prefetch": 2, "layers": 5},
    "sharded gradients": {"gradients": "sharded", "micro_batches": 3},
    "accumulation": {"micro_batches": 3},
    "twice": {"twice": True},
    "recompute": {"recompute": True, "micro_batches": 2},
    "reads weights in backward": {"custom": True},
    "recompute and reads": {"custom": True, "recompute": True, "reshard": "never"},
}


def settings_of(option: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of FlexShardConfig in an option."""
    found = {key: option[key] for key in ("reshard", "prefetch", "gradients") if key in option}
    name = option.get("placement", "row")
    config = current().config_class(current().registry("placement").find(name))
    return {**found, "placement": config(**({"tile": (4, 4)} if name == "block" else {}))}


def equal_one(names: list[str]) -> list[Any]:
    """[option, relative error of losses, of gradients and of parameters] of each option against one process with both ranks' batches."""
    world, found = join(), []
    for name in names:
        option = OPTIONS[name]
        micro_batches = option.get("micro_batches", 1)
        results = []
        for comm, ranks in ((world, [world.rank]), (SelfCommunicator(device()), [0, 1])):
            model, table, sharded = shard(option, comm, **settings_of(option))
            optimizer = TorchAdamW(sharded.parameters())
            batches = [
                [
                    tuple(torch.cat(parts) for parts in zip(*(batch(10 * step + number, rank) for rank in ranks), strict=True))
                    for number in range(micro_batches)
                ]
                for step in range(STEPS)
            ]
            losses = torch.stack(train(model, sharded, optimizer, batches)).double()
            losses = comm.all_reduce(losses, "sum", "losses") / comm.size
            with torch.no_grad():
                model(*batch(99, 0))
            tokens, labels = batches[0][0]
            model(tokens, labels).backward()
            sharded.finish_gradients()
            grads = {key: p.grad.cpu() for key, p in sharded.parameters().items() if p.grad is not None}
            results.append([{"losses": losses.tolist()}, whole_tensors(comm, table, grads), masters(comm, table, sharded)])
        found.append([name, *(max(errors(*pair)) for pair in zip(*results, strict=True))])
    return found


def errors(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    """||a - b|| / ||b|| by name."""
    assert one.keys() == other.keys()
    pairs = [(torch.tensor(one[name], dtype=torch.float64), torch.tensor(other[name], dtype=torch.float64)) for name in one]
    return [float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs]


def test_two_processes_equal_one(record_property: Any) -> None:
    results = on_two(equal_one, list(OPTIONS))
    record_property("relative errors of losses, gradients, parameters", results[0])
    assert [row[0] for row in results[0]] == list(OPTIONS)
    # Gradients and losses to rounding; parameters after Adam, which divides by roots of small numbers.
    assert [row for result in results for row in result if not (row[1] < 1e-5 and row[2] < 1e-4 and row[3] < 1e-3)] == []


# ---------------------------------------------------------------- lifetimes under delays


def pause() -> None:
    """Keep the current stream busy for about a millisecond; on a CPU this thread."""
    if DEVICE == "cuda":
        torch.cuda._sleep(2_000_000)
    else:
        time.sleep(0.001)


@contextlib.contextmanager
def delayed(call: str) -> Iterator[None]:
    """Whatever `Communicator.CALL` prepares starts late."""
    original = getattr(Communicator, call)

    def prepare(self: Any, *arguments: Any, **named: Any) -> Any:
        made = original(self, *arguments, **named)
        start = made.start

        def late(*given: Any) -> None:
            pause()
            start(*given)

        made.start = late
        return made

    setattr(Communicator, call, prepare)
    try:
        yield
    finally:
        setattr(Communicator, call, original)


def late(transport: str) -> list[Any]:
    """[case, what differs from the undelayed run]; released parameters are overwritten with NaN where the case says so."""
    world, reference, found = join(), None, []
    option = {"dim": 64, "hidden": 192, "layers": 6, "compute": "bfloat16"}
    batches = [[batch(10 * step + number, world.rank, rows=8) for number in range(2)] for step in range(STEPS)]
    chosen = None if not transport else current().config_class(current().registry("transport").find(transport))()
    cases = {
        "undelayed": contextlib.nullcontext,
        "released parameters read NaN": contextlib.nullcontext,
        "late gathers": lambda: delayed("prepare_gather"),
        "late reductions": lambda: delayed("prepare_reduce_scatter"),
        "late compute": contextlib.nullcontext,
        "late compute, NaN": contextlib.nullcontext,
    }
    for case, context in cases.items():
        with context():
            model, table, sharded = shard(option, world, debug="NaN" in case, transport=chosen, master="split", reshard="always")
            for block in model.blocks if "compute" in case else ():
                block.pause = pause
            losses = train(model, sharded, ours_optimizer(table, sharded, world), batches)
            result = {**masters(world, table, sharded), "losses": [loss.item() for loss in losses]}
        reference = reference or result
        found.append([case, unequal(result, reference)])
    assert all(torch.tensor(reference["losses"]).isfinite())
    return found


def test_delays_change_no_bit() -> None:
    for result in on_two(late, ""):
        assert [case for case in result if case[1]] == []


def slots() -> list[Any]:
    """Which blocks share memory, and whether parameters and their places stay what they are over steps and passes."""
    world = join()
    model, _, sharded = shard({"layers": 6, "frozen": False}, world, prefetch=1)
    optimizer = TorchAdamW(sharded.parameters())
    seen = []
    for step in range(3):
        train(model, sharded, optimizer, [[batch(step, world.rank)]])
        with torch.no_grad():
            model(*batch(50, 0))
        seen.append([(id(p), p.data_ptr()) for p in model.parameters()])
    assert seen[0] == seen[1] == seen[2]
    # A ring of two: prefetched blocks never land on the one that runs.
    pointers = [block.up.weight.data_ptr() for block in model.blocks]
    return [pointers.index(pointer) for pointer in pointers]


def test_blocks_take_turns_in_two_buffers() -> None:
    assert on_two(slots) == [[0, 1, 0, 1, 0, 1]] * 2


def counted() -> Any:
    """Gathers and reductions of the last of two steps with three micro-batches."""
    world = join()
    model, _, sharded = shard({"layers": 4, "frozen": False}, world)
    optimizer = TorchAdamW(sharded.parameters())
    groups = {comm for bucket in sharded.buckets for comm in (bucket.groups.gather, bucket.groups.reduce)}
    totals = []
    for step in range(2):
        train(model, sharded, optimizer, [[batch(10 * step + number, world.rank) for number in range(3)]])
        totals.append({what: each.calls for comm in groups for what, each in comm.stats().items()})
    return {what: calls - totals[0].get(what, 0) for what, calls in totals[1].items()}


def test_micro_batches_before_the_last_reduce_nothing() -> None:
    for result in on_two(counted):
        reductions = {what: calls for what, calls in result.items() if what.startswith("reduce")}
        assert reductions == {f"reduce {name}": 1 for name in ("root", *(f"blocks.{i}" for i in range(4)))}
        gathers = {what: calls for what, calls in result.items() if what.startswith("unshard")}
        # Forward and backward of three micro-batches; what the ring still holds is not gathered again. The root: once a step.
        assert gathers["unshard root"] == 1
        assert all(3 <= gathers[f"unshard blocks.{i}"] <= 6 for i in range(4)) and gathers["unshard blocks.3"] <= 4


# ---------------------------------------------------------------- capture, compile, copy engines


CAPTURED: dict[str, dict[str, Any]] = {
    "plain": {},
    "split masters, bfloat16": {"compute": "bfloat16", "settings": {"master": "split"}},
    "accumulation": {"micro_batches": 2},
    "kept whole": {"settings": {"reshard": "never"}},
    "prefetch 2, sharded gradients": {"layers": 5, "micro_batches": 2, "settings": {"prefetch": 2, "gradients": "sharded"}},
    "compiled": {"compile": "inductor"},
    "copy engines": {"compute": "bfloat16", "settings": {"master": "split"}, "transport": "copy_engine"},
}


def capture(names: list[str]) -> list[Any]:
    """[case, what differs] after three steps to warm up and four replays, against seven eager steps."""
    from intarsia_flexshard.capture import CapturedStep

    world, found = join(), []
    for name in names:
        option = CAPTURED[name]
        settings = dict(option.get("settings", {}))
        if "transport" in option:
            settings["transport"] = current().config_class(current().registry("transport").find(option["transport"]))()
        count = option.get("micro_batches", 1)
        batches = [[batch(10 * step + number, world.rank) for number in range(count)] for step in (0, 0, 0, 1, 2, 3, 4)]
        results = []
        for captured in (False, True):
            model, table, sharded = shard(option, world, **settings)
            optimizer = ours_optimizer(table, sharded, world)
            factor = torch.full((), 0.5, device=device())

            def run(
                *inputs: Tensor,
                model: Any = model,
                sharded: Any = sharded,
                optimizer: Any = optimizer,
                factor: Any = factor,
                count: int = count,
            ) -> Tensor:
                pairs = [(inputs[2 * number], inputs[2 * number + 1]) for number in range(count)]
                return torch.stack(train(model, sharded, optimizer, [pairs], factor=factor))

            flat = [[tensor for pair in step for tensor in pair] for step in batches]
            if captured:
                replay = CapturedStep(sharded, run, flat[0], warmup=3)
                losses = [replay(*inputs).clone() for inputs in flat[3:]]
            else:
                losses = [run(*inputs) for inputs in flat][3:]
            torch.cuda.synchronize()
            results.append({**masters(world, table, sharded), "losses": torch.stack(losses).tolist()})
        assert len(set(map(str, results[0]["losses"]))) == 4
        found.append([name, unequal(*results)])
    return found


@needs_cuda
def test_replayed_steps_have_the_bits_of_eager_ones() -> None:
    for result in on_two(capture, list(CAPTURED)):
        assert [case for case in result if case[1]] == []


def placed() -> list[Any]:
    """[case, what differs between gradients written in their places and packed by copying, how many were written there]."""
    from intarsia_flexshard.capture import CapturedStep
    from intarsia_kernels.linear.placed import linear

    world, found = join(), []
    taken, take = [0], gradients.take

    def counted_take(weight: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        place = take(weight, shape, dtype)
        taken[0] += place is not None
        return place

    gradients.take = counted_take
    option = {"dim": 64, "hidden": 192, "layers": 6, "compute": "bfloat16", "frozen": False}
    cases: dict[str, dict[str, Any]] = {"eager": {}, "recomputed": {"recompute": True}}
    if DEVICE == "cuda":
        cases |= {"compiled": {"compile": "inductor"}, "captured": {}}
    for name, more in cases.items():
        results, counts = [], []
        for is_placed in (False, True):
            taken[0] = 0
            with ops.installed({"linear": ops.Choice("intarsia-kernels:placed", "asked for", linear)}):
                model, table, sharded = shard({**option, **more}, world, master="split", placement=Flat(), placed=is_placed)
                optimizer = ours_optimizer(table, sharded, world)
                factor = torch.full((), 0.5, device=device())

                def run(
                    *inputs: Tensor, model: Any = model, sharded: Any = sharded, optimizer: Any = optimizer, factor: Any = factor
                ) -> Any:
                    return torch.stack(train(model, sharded, optimizer, [[inputs]], factor=factor))

                batches = [batch(step, world.rank, rows=8) for step in (0, 0, 0, 1, 2, 3)]
                step = CapturedStep(sharded, run, batches[0], warmup=3) if name == "captured" else run
                losses = [step(*inputs).clone() for inputs in (batches[3:] if name == "captured" else batches)]
            counts.append(taken[0])
            results.append({**masters(world, table, sharded), "losses": torch.stack(losses).tolist()})
        found.append([name, unequal(*results), counts])
    gradients.take = take
    return found


def test_gradients_written_in_their_places_are_the_same_bits() -> None:
    for result in on_two(placed):
        for name, differing, (none, some) in result:
            assert differing == [] and none == 0 and some > 0, (name, differing, none, some)
            # From the second step on, of six blocks both matrices; a captured step runs three times, and is recorded once.
            if DEVICE == "cuda":
                assert some == 12 * (3 if name == "captured" else 5), (name, some)


def compiled(backend: str) -> Any:
    """[relative errors against eager, graphs after the first step, graphs at the end]."""
    from torch._dynamo.utils import counters

    world, results, graphs = join(), [], []
    for option in ({"frozen": False}, {"frozen": False, "compile": backend}):
        model, _, sharded = shard(option, world)
        optimizer = TorchAdamW(sharded.parameters())
        losses = []
        for step in range(4):
            losses += train(model, sharded, optimizer, [[batch(step, world.rank)]])
            graphs.append(counters["stats"]["unique_graphs"])
        results.append({"losses": [loss.item() for loss in losses]})
    return [max(errors(*results)), graphs[4], graphs[7]]


def test_compiled_blocks_are_compiled_once() -> None:
    for error, first, last in on_two(compiled, "inductor" if DEVICE == "cuda" else "aot_eager"):
        assert error < 1e-4 and first > 0 and last == first


def engines() -> list[Any]:
    """What differs between gathers by NCCL and by the copy engines."""
    world, results = join(), []
    option = {"dim": 64, "hidden": 192, "layers": 6, "compute": "bfloat16"}
    # Collectives and copies are graphs of their own from the third step on.
    batches = [[batch(10 * step + number, world.rank, rows=8) for number in range(2)] for step in range(STEPS + 2)]
    for transport in (None, "copy_engine"):
        chosen = None if transport is None else current().config_class(current().registry("transport").find(transport))()
        model, table, sharded = shard(option, world, transport=chosen, master="split")
        losses = train(model, sharded, ours_optimizer(table, sharded, world), batches)
        gathers = {bucket.groups.gather for bucket in sharded.buckets}
        allocated = sum(comm.transport.bytes_allocated for comm in gathers if comm.transport is not None)
        assert (allocated > 0) == (transport is not None)
        assert all(isinstance(bucket.gather, Recorded) for bucket in sharded.buckets if bucket.gather is not None)
        results.append({**masters(world, table, sharded), "losses": [loss.item() for loss in losses]})
    return unequal(*results)


@needs_cuda
def test_copy_engines_bring_the_bits_of_nccl() -> None:
    assert on_two(engines) == [[], []]


@needs_cuda
def test_delays_change_no_bit_with_copy_engines() -> None:
    for result in on_two(late, "copy_engine"):
        assert [case for case in result if case[1]] == []


# ---------------------------------------------------------------- meta models, state


def from_meta() -> Any:
    """A model that was never anywhere gets shards on the device, every gradient, and its state goes into another one."""
    world = join()
    model, table, sharded = shard({"frozen": False}, world)
    assert not any(p.is_meta for p in model.parameters())
    assert {p.device.type for p in sharded.parameters().values()} == {device().type}
    held = sum(p.numel() for p in sharded.parameters().values())
    whole = sum(p.numel() for p in model.parameters())
    model(*batch(0, world.rank)).backward()
    sharded.finish_gradients()
    missing = [name for name, p in sharded.parameters().items() if p.grad is None and p.numel()]
    losses = []
    values = {name: value.clone() for name, value in sharded.masters().items()}
    other, other_table, taker = shard({"frozen": False, "seed": 5}, world)
    for parameter, name in zip(taker.parameters().values(), taker.parameters(), strict=True):
        parameter.data.copy_(values[name])
    taker.load_masters(values)
    taker.after_update()
    sharded.zero_gradients()
    for each, owner, names in ((model, sharded, table), (other, taker, other_table)):
        losses.append(
            [loss.item() for loss in train(each, owner, TorchAdamW(owner.parameters()), [[batch(1, world.rank)], [batch(2, world.rank)]])]
        )
        losses[-1].append(masters(world, names, owner))
    return [held < whole * 0.6, missing, losses[0] == losses[1]]


def test_meta_models_and_their_state() -> None:
    assert on_two(from_meta) == [[True, [], True]] * 2


def test_a_group_of_one_divides_too() -> None:
    model, _, sharded = shard({"frozen": False}, SelfCommunicator(device()), divisor=4.0)
    tokens, labels = batch(0, 0)
    model(tokens, labels).backward()
    sharded.finish_gradients()
    quarter = {name: p.grad.clone() for name, p in sharded.parameters().items()}
    model, _, sharded = shard({"frozen": False}, SelfCommunicator(device()), reduce_op="sum")
    model(tokens, labels).backward()
    sharded.finish_gradients()
    for name, parameter in sharded.parameters().items():
        torch.testing.assert_close(quarter[name] * 4, parameter.grad, rtol=1e-6, atol=1e-7)
