"""What trainers publish: version 0 is what a generator draws itself, and every version is what the trainer computes with, bit for bit, whatever cuts the parameters.

Ranks are threads here; `tests/distributed/test_rl_weights_processes.py` has processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chz
import pytest
import torch
from _weights import build, change, gathered, recipe_of
from intarsia import plugins
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.config import Recipe, Resolved
from intarsia.contracts import Box
from intarsia.layout import slices
from intarsia.train.state import ModelState
from intarsia_flexshard.config import BucketConfig
from intarsia_rl.contracts import WeightTransport, WeightVersion
from intarsia_rl.weights import build as weights_build
from intarsia_rl.weights.build import build_model, fill_initial
from intarsia_rl.weights.config import SharedMemoryConfig, SocketConfig
from intarsia_rl.weights.fill import fill, filled_version, own_tensors
from intarsia_rl.weights.shared_memory import SharedMemory
from intarsia_rl.weights.socket import Socket
from intarsia_testing.communicator import run_ranks
from torch import Tensor, nn

LLAMA, DEEPSEEK = "llama3/debug", "deepseek_v3/debug"
BF16 = "precision.compute=bfloat16"
PIPELINE = ("engine=pipeline", "engine.few_micro_batches=true")


def model_of(recipe: Recipe, version: WeightVersion | None = None) -> nn.Module:
    """A generator's model: of a version, or the initial one."""
    model = build_model(recipe, plugins.current(), "cpu", recipe.precision.compute)
    if version is None:
        fill_initial(model, recipe, plugins.current())
    else:
        fill(model, version, plugins.current())
        assert filled_version(model) == version.version
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    return model


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Bit for bit, dtypes too."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(
            found[name].view(torch.uint8) if tensor.ndim else found[name], tensor.view(torch.uint8) if tensor.ndim else tensor
        ), name


def rounds(world: Communicator, resolved: Resolved, transport: WeightTransport) -> Mapping[str, str]:
    """Version 0, a change, version 1; its digests."""
    try:
        run = build(resolved, world)
        first = transport.publish(0, run.parts)
        if first is not None:
            same(own_tensors(model_of(resolved.recipe, first)), own_tensors(model_of(resolved.recipe)))
        world.barrier("read")
        change(run, 1)
        second = transport.publish(1, run.parts)
        computed = gathered(run)
        if second is not None:
            own = own_tensors(model_of(resolved.recipe, second))
            assert computed
            same({name: own[name] for name in computed}, computed)
            for name, buffer in run.parts["model"].named_buffers():
                assert name not in own or torch.equal(own[name], buffer)
        world.barrier("read")
        return {} if second is None else second.digests
    finally:
        transport.close()


def digests(ranks: int, resolved: Resolved, folder: Path) -> Mapping[str, str]:
    """Of version 1, by that many ranks."""
    return run_ranks(ranks, lambda world: rounds(world, resolved, SharedMemory(SharedMemoryConfig(), folder)))[0]


@pytest.mark.parametrize(
    ("ranks", "name", "overrides"),
    [
        (1, LLAMA, ()),
        (1, LLAMA, ("model.tied=true",)),
        (2, LLAMA, ("sharder=whole", "mesh.dp_replicate=2")),
        (1, DEEPSEEK, (BF16,)),
        (2, DEEPSEEK, (BF16,)),
        (2, DEEPSEEK, (BF16, "sharder.master=split")),
        (2, DEEPSEEK, (BF16, "precision.master=bfloat16")),
        (3, LLAMA, (BF16, "sharder.placement=flat")),
        (2, LLAMA, (BF16, "sharder.placement=owned")),
        (2, LLAMA, (BF16, "sharder.placement=column")),
        (2, LLAMA, (BF16, "sharder.placement=block", "sharder.placement.tile=[32,16]")),
        (2, LLAMA, (BF16, "sharder.placement=replicate")),
        (4, LLAMA, (BF16, "mesh.tp=2", "mesh.dp_replicate=2", "mesh.dp_shard=1")),
        (4, DEEPSEEK, (BF16, "mesh.tp=2", "mesh.ep=2")),
        (4, DEEPSEEK, (BF16, "mesh.pp=2", "mesh.ep=2", "sharder.master=split", *PIPELINE)),
        (2, LLAMA, ("model.tied=true", "mesh.pp=2", *PIPELINE)),
        (2, LLAMA, ("mesh.cp=2",)),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, tuple) else str(value),
)
def test_what_is_published_is_what_is_computed_with(tmp_path: Path, ranks: int, name: str, overrides: tuple[str, ...]) -> None:
    found = digests(ranks, recipe_of(name, *overrides), tmp_path)
    if ranks > 1:
        alone = [each for each in overrides if not each.startswith(("mesh.", "engine", "sharder.placement"))]
        assert found == digests(1, recipe_of(name, *alone), tmp_path)


def test_over_sockets(tmp_path: Path) -> None:
    resolved = recipe_of(DEEPSEEK, BF16, "mesh.ep=2", "sharder.placement=flat")
    run_ranks(2, lambda world: rounds(world, resolved, Socket(SocketConfig(), tmp_path)))


def test_buckets_that_compute_in_another_dtype(tmp_path: Path) -> None:
    """A generator holds those parameters as the trainer does."""
    resolved = recipe_of(DEEPSEEK, BF16)
    bucket = BucketConfig(name="norms", match=("*norm*",), compute="float32")
    resolved.recipe = chz.replace(resolved.recipe, sharder=chz.replace(resolved.recipe.sharder, buckets=(bucket,)))
    kinds = {name: tensor.dtype for name, tensor in own_tensors(model_of(resolved.recipe)).items()}
    assert {kind for name, kind in kinds.items() if "norm" in name} == {torch.float32}
    assert torch.bfloat16 in kinds.values()
    run_ranks(2, lambda world: rounds(world, resolved, SharedMemory(SharedMemoryConfig(), tmp_path)))


def test_the_dtype_of_a_generator_of_its_own(tmp_path: Path) -> None:
    """A trainer in float32 and a generator in bfloat16: routers stay float32, and version 0 drawn is version 0 published."""
    recipe = recipe_of(DEEPSEEK, "sharder=whole").recipe
    run = build(recipe_of(DEEPSEEK, "sharder=whole"), SelfCommunicator())
    transport = SharedMemory(SharedMemoryConfig(), tmp_path)
    version = transport.publish(0, run.parts)
    assert version is not None
    drawn, taken = (build_model(recipe, plugins.current(), "cpu", "bfloat16") for _ in range(2))
    fill_initial(drawn, recipe, plugins.current())
    fill(taken, version, plugins.current())
    same(own_tensors(taken), own_tensors(drawn))
    kinds = {name: tensor.dtype for name, tensor in own_tensors(drawn).items()}
    assert {kind for name, kind in kinds.items() if name.endswith("router.weight")} == {torch.float32} and torch.bfloat16 in kinds.values()
    transport.close()


class Weights:
    """Weights of another run, in a dtype of their own."""

    location = "elsewhere"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._values = {}
        for number, (name, shape) in enumerate(shapes.items()):
            self._values[name] = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number)).to(dtype)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self._values.items()}

    def read(self, name: str, box: Box | None = None) -> Tensor:
        return self._values[name] if box is None else self._values[name][slices(box)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("master", ["float32", "split"])
def test_weights_to_begin_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, master: str) -> None:
    """`train.init_from`: rounded to the master's dtype first and then to the one that is computed with, as the trainer does it."""
    resolved = recipe_of(DEEPSEEK, BF16, f"sharder.master={master}", "train.init_from=elsewhere")
    opened: list[Any] = []

    def rank(world: Communicator) -> None:
        run = build(resolved, world)
        state = ModelState(run.parts["model"], run.parts["parameters"], run.parts["table"])
        weights = Weights({item.name: tuple((item.layout or item.value).shape) for item in state.state()}, dtype)
        state.fill(weights)  # type: ignore[arg-type]
        transport = SharedMemory(SharedMemoryConfig(), tmp_path)
        version = transport.publish(0, run.parts)
        if version is not None:
            monkeypatch.setattr(weights_build, "open_weights", lambda path, loaded: opened.append(path) or weights)
            same(own_tensors(model_of(resolved.recipe, version)), own_tensors(model_of(resolved.recipe)))
        world.barrier("read")
        transport.close()

    run_ranks(2, rank)
    assert opened == ["elsewhere"]
