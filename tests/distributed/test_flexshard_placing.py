"""Gradients that are written where they are packed are those that are packed by copying, bit for bit, whatever comes between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from _sharded import whole_tensors
from _spawn import spawn
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.config import MeshConfig
from intarsia.contracts import Init, Regions
from intarsia.errors import PluginError
from intarsia.mesh import Mesh, check_mesh
from intarsia.ops import gradients
from intarsia.parameters import ParameterTable
from intarsia_flexshard import runtime
from intarsia_flexshard.config import BucketConfig, FlexShardConfig
from intarsia_flexshard.runtime import build
from intarsia_float8.format import dequantise
from intarsia_kernels.linear.placed import linear
from intarsia_kernels.linear.weights import weight_gradient
from intarsia_placements.config import Flat, Owned, Row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM, HIDDEN, VOCAB, DEPTH = 16, 32, 32, 5
TILE = (8, 8)
PLACEMENTS = {"flat": Flat(), "owned": Owned(), "row": Row()}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"recompute": True},
    "called twice": {"twice": True},
    "one matrix twice in a call": {"again": True},
    "accumulated": {"micro_batches": 3},
    "frozen": {"frozen": ("blocks.1.up", "blocks.3")},
    "unused": {"skip": 2},
    "half precision": {"compute": "bfloat16"},
    "never given back": {"reshard": "never"},
    "float8": {"greedy": True, "payload": "fp8", "compute": "bfloat16"},
    # One parameter is sent without being packed, unless it has no gradient: then zeros are packed.
    "a bucket of one": {"greedy": True, "skip": 1, "buckets": (BucketConfig(name="only", match=("blocks.1.up.weight",)),)},
}


class Block(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.up, self.down, self.bias = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM), nn.Parameter(torch.empty(HIDDEN))
        self.again = again

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSH = linear(x_BSD, self.up.weight) + self.bias
        if self.again:
            y_BSH = y_BSH + linear(x_BSD.tanh(), self.up.weight)
        return x_BSD + linear(nn.functional.gelu(y_BSH), self.down.weight, self.down.bias)


class _Greedy(torch.autograd.Function):
    """Takes a place without asking whether the weight is marked, as kernels do that have an autograd function anyway. `read` is what it multiplies by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, read: Tensor, scales: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, read)
        ctx.scales = scales
        return x @ _values(read, scales, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, read = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        return grads[0] @ _values(read, ctx.scales, x.dtype), weight_gradient(rows, x.flatten(0, -2), read), None, None


def _values(read: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    return read if scales is None else dequantise(read, scales, TILE, dtype)


class Reads(nn.Linear):
    """Reads float8 where that is gathered."""

    reads_payload: ClassVar[tuple[str, ...]] = ("weight",)
    weight_payload: Tensor | None = None
    weight_scales: Tensor | None = None
    weight_tile = TILE

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Greedy.apply(x, self.weight, self.weight if self.weight_payload is None else self.weight_payload, self.weight_scales)
        return y


class Greedy(nn.Module):
    """A block of such layers, which may call another block before its second one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Reads(DIM, HIDDEN, bias=False), Reads(HIDDEN, DIM, bias=False)
        self.inner: list[nn.Module] = []

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSH = self.up(x_BSD)
        for block in self.inner:
            x_BSD = block(x_BSD)
        return x_BSD + self.down(y_BSH.tanh())


class Deep(nn.Module):
    def __init__(self, option: Mapping[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Greedy() if option.get("greedy") else Block(option.get("again", False)) for _ in range(DEPTH)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.option = dict(option)

    def regions(self) -> Regions:
        return Regions(blocks=tuple(f"blocks.{number}" for number in range(DEPTH)), ties=())

    def inits(self) -> Mapping[str, Init]:
        return {name: Init("normal", std=0.15) for name, _ in self.named_parameters()}

    def forward(self, tokens_BS: Tensor, skip: int = -1) -> Tensor:
        x_BSD = self.embedding(tokens_BS)
        for number, block in enumerate((*self.blocks, self.blocks[1]) if self.option.get("twice") else self.blocks):
            if number != skip:
                x_BSD = checkpoint(block, x_BSD, use_reentrant=False) if self.option.get("recompute") else block(x_BSD)
        return self.head(x_BSD)


class Case:
    """A sharded model and its steps."""

    placed = True

    def __init__(self, world: Communicator, option: Mapping[str, Any], placement: str) -> None:
        self.world, self.option = world, option
        mesh = Mesh(check_mesh(MeshConfig(), world.size), world)
        with torch.device("meta"):
            self.model = Deep(option)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not name.startswith(option.get("frozen", "-")))
        self.table = ParameterTable.from_model(self.model, "float32", option.get("compute", "float32"), "float32", seed=3)
        settings = {name: option[name] for name in ("reshard", "payload", "buckets") if name in option}
        config = FlexShardConfig(placement=PLACEMENTS[placement], placed=self.placed, tile=TILE, **settings)
        self.sharded: Any = build(config).shard(self.model, self.table, mesh, world)
        self.number = 0

    def step(self) -> dict[str, Any]:
        """One step of plain gradient descent; its gradients, whole."""
        micro_batches = self.option.get("micro_batches", 1)
        for micro_batch in range(micro_batches):
            self.sharded.set_last_micro_batch(micro_batch == micro_batches - 1)
            self.loss(micro_batch).backward()
        self.sharded.finish_gradients()
        parameters = self.sharded.parameters()
        found = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        result = whole_tensors(self.world, self.table, found)
        with torch.no_grad():
            for name, gradient in found.items():
                parameters[name].add_(gradient, alpha=-0.02)
        self.sharded.zero_gradients()
        self.sharded.after_update()
        self.number += 1
        return result

    def loss(self, micro_batch: int = 0) -> Tensor:
        drawn = torch.Generator().manual_seed(100 * self.number + 10 * micro_batch + self.world.rank)
        tokens_BS = torch.randint(VOCAB, (2, 8), generator=drawn)
        logits_BSV: Tensor = self.model(tokens_BS, self.option.get("skip", -1))
        return nn.functional.cross_entropy(logits_BSV.float().flatten(0, 1), tokens_BS.flatten())


@contextmanager
def offered(places: bool) -> Iterator[list[int]]:
    """Offer places, or none; how many were taken. At most one sum is under way, so that a pack is free when the bucket after the next one wants it, as it is on a GPU."""
    taken, pending, takes, before = [0], runtime.PENDING, gradients.take, set(gradients._places)

    def take(weight: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        found = takes(weight, shape, dtype)
        taken[0] += found is not None
        return found

    gradients.take, runtime.PENDING, Case.placed = take, 1, places
    try:
        yield taken
    finally:
        gradients.take, runtime.PENDING = takes, pending
        # Other tests' models may have left some.
        assert set(gradients._places) <= before


def both(world: Communicator, option: Mapping[str, Any], placement: str) -> tuple[bool, int]:
    """Whether three steps are equal with and without, and how many gradients were written in their places."""
    with offered(False):
        case = Case(world, option, placement)
        wanted = [case.step() for _ in range(3)]
    with offered(True) as taken:
        case = Case(world, option, placement)
        found = [case.step() for _ in range(3)]
    return found == wanted, taken[0]


def run_cases(world: Communicator) -> dict[str, Any]:
    cases = [(name, placement) for name in OPTIONS for placement in (PLACEMENTS if world.size == 2 else ("flat",))]
    return {f"{name}, {placement}": both(world, OPTIONS[name], placement) for name, placement in cases}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_the_same_bits_in_their_places(ranks: int) -> None:
    results = spawn(run_cases, ranks) if ranks > 1 else [run_cases(SelfCommunicator())]
    for result in results:
        for name, (equal, _) in result.items():
            assert equal, name
    counts = {name: [result[name][1] for result in results] for name in results[0]}
    # In the second and third step, of each block both matrices; what is frozen or skipped has none.
    assert all(count == 2 * 2 * DEPTH for count in counts["plain, flat"]), counts
    assert all(min(counts[f"{name}, flat"]) > 0 for name in OPTIONS if name != "accumulated"), counts
    assert not any(counts["accumulated, flat"]), counts


def test_a_reduction_between_takes_gradients_out_of_the_pack() -> None:
    """Somebody reduces another bucket of the same pack while backward is inside of one."""

    def steps(places: bool) -> tuple[list[dict[str, Any]], int]:
        with offered(places) as taken:
            case = Case(SelfCommunicator(), {}, "flat")
            blocks = [bucket for bucket in case.sharded.buckets if bucket.name.startswith("blocks")]
            pack = blocks[3].reduction.pack
            other = next(bucket for bucket in blocks[:3] if bucket.reduction.pack is pack)
            parameter = case.model.blocks[3].down.weight
            parameter.register_post_accumulate_grad_hook(lambda _: case.sharded.reduce(other.name))
            return [case.step() for _ in range(3)], taken[0]

    (wanted, none), (found, taken) = steps(False), steps(True)
    assert found == wanted
    assert taken and not none


def test_a_gradient_on_its_way_is_not_overwritten() -> None:
    with offered(True):
        case = Case(SelfCommunicator(), {}, "flat")
        case.step()
        blocks = [bucket for bucket in case.sharded.buckets if bucket.name.startswith("blocks")]
        other = next(bucket for bucket in blocks[:3] if bucket.reduction.pack is blocks[3].reduction.pack)
        # The parameter's own hook runs before the gradient is the parameter's.
        case.model.blocks[3].down.weight.register_hook(lambda _: case.sharded.reduce(other.name))
        with pytest.raises(PluginError, match=r"'blocks.3'.*sharder.placed=false"):
            case.loss().backward()
        case.sharded.zero_gradients()


def test_gradients_that_are_handed_out_are_nobody_elses() -> None:
    def gradients_of(places: bool) -> list[list[float]]:
        with offered(places):
            case = Case(SelfCommunicator(), {}, "flat")
            case.step()
            case.step()
            wanted = [block.up.weight for block in case.model.blocks]
            found = torch.autograd.grad(case.loss(), wanted)
            case.sharded.finish_gradients()
            return [gradient.flatten().tolist() for gradient in found]

    assert gradients_of(True) == gradients_of(False)


@pytest.mark.parametrize("calls", [True, False])
def test_a_block_that_calls_another_is_left_out(calls: bool) -> None:
    def steps(places: bool) -> tuple[list[dict[str, Any]], int, set[str]]:
        with offered(places) as taken:
            case = Case(SelfCommunicator(), {"greedy": True, "reshard": "never", "skip": 1}, "flat")
            case.model.blocks[3].inner = [case.model.blocks[1]] if calls else []
            return [case.step() for _ in range(3)], taken[0], {bucket.name for bucket in case.sharded._placing._reads}

    (wanted, none, _), (found, taken, left) = steps(False), steps(True)
    assert found == wanted and none == 0 and taken > 0
    assert left == {f"blocks.{number}" for number in range(DEPTH) if number != 3 or not calls}


@pytest.mark.parametrize("clears", [True, False])
def test_a_backward_pass_that_fails_leaves_nothing(clears: bool) -> None:
    class Stop(Exception):
        pass

    def stop(_: Tensor) -> None:
        raise Stop

    def steps(fails: bool, places: bool) -> list[dict[str, Any]]:
        with offered(places) as taken:
            case = Case(SelfCommunicator(), {}, "flat")
            found = [case.step()]
            if fails:
                handle = case.model.blocks[2].up.weight.register_hook(stop)
                with pytest.raises(Stop):
                    case.loss().backward()
                handle.remove()
                if clears:
                    case.sharded.zero_gradients()
            found += [case.step(), case.step()]
            assert bool(taken[0]) is places
            return found

    assert steps(True, True) == steps(True, False)
    if clears:
        assert steps(True, True) == steps(False, True)
