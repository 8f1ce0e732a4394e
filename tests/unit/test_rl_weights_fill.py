"""A generator takes a version: models that hold canonical tensors, fused ones, experts in a stack, boxes of a mesh; and weights that did not arrive as they were published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from intarsia.comm import Communicator, SelfCommunicator
from intarsia.config import PlacementConfig
from intarsia.contracts import Box, Member, Regions
from intarsia.errors import DistributedError, NumericsError, UsageError
from intarsia.layout import region_numel, region_parts, slices
from intarsia.plugins import current
from intarsia_placements.config import Block, Column, Flat, Owned, Replicate, Row
from intarsia_placements.layouts import build_layouts
from intarsia_rl.contracts import WeightVersion
from intarsia_rl.weights.config import SharedMemoryConfig
from intarsia_rl.weights.fill import Part, fill, filled_version, forget, held_parts, own_tensors
from intarsia_rl.weights.shared_memory import SharedMemory
from intarsia_testing.communicator import run_ranks
from intarsia_testing.strategies import example_settings
from intarsia_testing.weight_transport import SHAPES, Small, Trainer, published
from torch import Tensor, nn

VALUES = published(0)
ALL = (*SHAPES, "bias")


@pytest.fixture(scope="module")
def transport(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedMemory]:
    made = SharedMemory(SharedMemoryConfig(), tmp_path_factory.mktemp("run"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def version(transport: SharedMemory) -> WeightVersion:
    """Version 0 of the kit's small model."""
    made = transport.publish(0, Trainer(SelfCommunicator()).parts)
    assert made is not None
    return made


class Holder(nn.Module):
    """A model of any tensors, that says what they are made of."""

    def __init__(self, tensors: Mapping[str, Tensor], parts: Mapping[str, Sequence[Part]] | None = None) -> None:
        super().__init__()
        self.parts = parts
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def regions(self) -> Regions:
        """No ties."""
        return Regions(blocks=())

    def holds(self) -> Mapping[str, Sequence[Part]]:
        """What it was given."""
        return self.parts or {}


def empty(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(tuple(shape), float("nan"), dtype=dtype)


def like(**others: Tensor) -> dict[str, Tensor]:
    """Empty canonical tensors, some of them replaced."""
    return {name: empty(VALUES[name].shape, VALUES[name].dtype) for name in ALL} | others


def take(model: nn.Module, version: WeightVersion, **options: Any) -> nn.Module:
    fill(model, version, current(), **options)
    return model


# ---------------------------------------------------------------- what models hold


def test_canonical_tensors_and_buffers(version: WeightVersion) -> None:
    model = Small()
    for name in SHAPES:
        setattr(model, name, nn.Parameter(empty(SHAPES[name], getattr(model, name).dtype), requires_grad=False))
    take(model, version)
    assert filled_version(model) == 0
    for name, tensor in own_tensors(model).items():
        assert torch.equal(tensor, VALUES[name])


def test_fused_and_stacked(version: WeightVersion) -> None:
    """Two tensors one above the other; a vector as the row of a matrix; slices of a stack as tensors of their own; a tensor held twice."""
    tensors = {"scalar": empty(()), "nothing": empty((0, 4)), "bias": empty((3,), torch.float32)}
    tensors |= {
        "fused": empty((13, 7)),
        "first": empty((3, 5)),
        "second": empty((15,)),
        "again": empty((4, 3), torch.float32),
        "wide": empty((4, 3), torch.float32),
    }
    parts = {
        "fused": [Part("matrix", where=Box((0, 0), (9, 7))), Part("vector", where=Box((9, 1), (1, 5))), Part("matrix", Box((0, 0), (3, 7)), Box((10, 0), (3, 7))),
                  Part("matrix", Box((0, 0), (1, 1)), Box((9, 0), (1, 1))), Part("matrix", Box((0, 1), (1, 1)), Box((9, 6), (1, 1)))],
        "first": [Part("stack", Box((0, 0, 0), (1, 3, 5)))],
        "second": [Part("stack", Box((1, 0, 0), (1, 3, 5)))],
        "again": [Part("wide")],
    }  # fmt: skip
    model = take(Holder(tensors, parts), version)
    own = own_tensors(model)
    assert torch.equal(own["fused"][:9], VALUES["matrix"]) and torch.equal(own["fused"][10:], VALUES["matrix"][:3])
    assert torch.equal(own["fused"][9, 1:6], VALUES["vector"])
    assert torch.equal(own["first"], VALUES["stack"][0]) and torch.equal(own["second"], VALUES["stack"][1].reshape(-1))
    assert torch.equal(own["again"], VALUES["wide"]) and torch.equal(own["wide"], VALUES["wide"])


PLACEMENTS: tuple[PlacementConfig, ...] = (
    Row(),
    Column(),
    Row(dim=-1),
    Flat(unit=1),
    Flat(unit=4),
    Owned(),
    Block(tile=(2, 3)),
    Replicate(),
)


@example_settings(40)
@given(st.lists(st.sampled_from(range(len(PLACEMENTS))), min_size=1, max_size=2), st.lists(st.integers(1, 3), min_size=2, max_size=2))
def test_any_mesh_of_generators(version: WeightVersion, chosen: list[int], sizes: list[int]) -> None:
    """Every rank of a mesh that cuts the tensors as a layout says has what a cut of the whole tensors gives, with and without comparing over ranks."""
    members = [Member(name, tuple(tensor.shape), "bfloat16") for name, tensor in VALUES.items()]
    steps = [(f"axis{number}", sizes[number], current().build(PLACEMENTS[kind])) for number, kind in enumerate(chosen)]
    try:
        layouts = build_layouts(members, steps)
    except UsageError:
        return
    for rank in range(layouts["matrix"].ranks):
        tensors = {}
        for name, layout in layouts.items():
            region = layout.local(rank)
            tensors[name] = empty(region[0].size if len(region) == 1 else (region_numel(region),), VALUES[name].dtype)
        model = Holder(tensors, held_parts(layouts, rank))
        take(model, version)
        for name, layout in layouts.items():
            for box, view in region_parts(own_tensors(model)[name].reshape(-1), layout.local(rank), Box.whole(VALUES[name].shape)):
                assert torch.equal(view, VALUES[name][slices(box)])


def test_parts_of_several_ranks_are_compared_with_what_was_published(version: WeightVersion) -> None:
    """Each of two holders has half of some tensors; a wrong one on one rank is found on both."""
    layouts = build_layouts([Member("matrix", (9, 7)), Member("stack", (2, 3, 5))], [("tp", 2, current().build(Row()))])

    def rank(world: Communicator, digests: Mapping[str, str]) -> list[str]:
        tensors = like(**{name: empty(layout.local(world.rank)[0].size) for name, layout in layouts.items()})
        stated = WeightVersion(0, version.transport, version.location, digests, version.dtypes, version.shapes)
        try:
            take(Holder(tensors, held_parts(layouts, world.rank)), stated, combine=lambda sums: world.all_reduce(sums, "sum", "digests"))
        except NumericsError as error:
            return [name for name in ALL if f" {name}" in str(error)]
        return []

    assert run_ranks(2, lambda world: rank(world, version.digests)) == [[], []]
    assert run_ranks(2, lambda world: rank(world, {**version.digests, "stack": "0" * 32})) == [["stack"], ["stack"]]


# ---------------------------------------------------------------- dtypes


def test_a_wider_dtype_keeps_the_published_bits(version: WeightVersion) -> None:
    model = take(Holder(like(matrix=empty((9, 7), torch.float32))), version)
    assert torch.equal(own_tensors(model)["matrix"], VALUES["matrix"].float())


def test_a_narrower_dtype_rounds_to_nearest_even(version: WeightVersion) -> None:
    model = take(Holder(like(wide=empty((4, 3)), matrix=empty((9, 7), torch.float16))), version)
    assert torch.equal(own_tensors(model)["wide"], VALUES["wide"].to(torch.bfloat16))
    assert torch.equal(own_tensors(model)["matrix"], VALUES["matrix"].to(torch.float16))


# ---------------------------------------------------------------- what does not arrive


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=["same", "wider", "narrower"])
def test_damaged_weights_are_named(tmp_path: Path, dtype: torch.dtype) -> None:
    transport = SharedMemory(SharedMemoryConfig(folder=str(tmp_path)), tmp_path)
    version = transport.publish(4, Trainer(SelfCommunicator()).parts)
    assert version is not None
    data = bytearray(Path(version.location["path"]).read_bytes())
    at = data.index(bytes(VALUES["stack"].view(torch.uint8).reshape(-1).numpy()))
    data[at + 7] ^= 1
    Path(version.location["path"]).write_bytes(data)
    model = Holder(like(stack=empty((2, 3, 5), dtype)))
    with pytest.raises(
        NumericsError, match=r"Version 4 of the weights is not in the model as 'shared_memory' published it: stack differs\."
    ):
        take(model, version)
    assert filled_version(model) is None
    transport.close()


@pytest.mark.parametrize("rows", [5, 9])
def test_memory_that_does_not_keep_what_is_written_is_found(version: WeightVersion, rows: int) -> None:
    """The model is read back, whatever came from the transport: two of its tensors share memory. Also where the published digest says nothing of a part."""
    memory = empty((9 * 7,))
    parts = {"matrix": [Part("matrix", Box((0, 0), (rows, 7)))]}
    model = Holder(like(matrix=memory[: rows * 7].view(rows, 7), vector=memory[:5]), parts)
    with pytest.raises(NumericsError, match=": matrix differs"):
        take(model, version)


def test_a_fill_that_is_interrupted_leaves_no_version(version: WeightVersion, transport: SharedMemory) -> None:
    model = take(Holder(like()), version)
    assert filled_version(model) == 0
    gone = WeightVersion(1, version.transport, {**version.location, "version": 1}, version.digests, version.dtypes, version.shapes)
    with pytest.raises(DistributedError, match="does not hold version 1"):
        take(model, gone)
    assert filled_version(model) is None
    take(model, version)
    assert filled_version(model) == 0


def test_the_version_that_is_there_is_not_read_again(version: WeightVersion) -> None:
    model = take(Holder(like()), version)
    nowhere = WeightVersion(0, version.transport, {"path": "/nowhere"}, version.digests, version.dtypes, version.shapes)
    take(model, nowhere)
    forget(model)
    with pytest.raises((DistributedError, KeyError)):
        take(model, nowhere)


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("tensors", "parts", "message"),
    [
        ({"matricks": empty((9, 7))}, None, "matricks wants matricks, which was not published. Did you mean 'matrix'?"),
        ({"matrix": empty((7, 9))}, None, r"matrix has shape \[7, 9\] and cannot take matrix \[0:9, 0:7\] of \[9, 7\]"),
        ({"matrix": empty((10, 7))}, {"matrix": [Part("matrix", where=Box((0, 0), (9, 7)))]}, "matrix of shape \\[10, 7\\] is made of do not cover it once: \\[0:9, 0:7\\]"),
        ({"matrix": empty((9, 7))}, {"matrix": [Part("matrix"), Part("matrix")]}, "do not cover it once"),
        ({"matrix": empty((9, 7))}, {"matrix": [Part("matrix", Box((1, 0), (9, 7)))]}, r"cannot take matrix \[1:10, 0:7\]"),
        ({}, {"qkv": [Part("matrix")]}, "says that it holds qkv, which it does not have"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_before_anything_is_copied(version: WeightVersion, tensors: Any, parts: Any, message: str) -> None:
    model = Holder(like(**tensors), parts)
    with pytest.raises(UsageError, match=message):
        take(model, version)
    assert all(tensor.isnan().all() for tensor in own_tensors(model).values())


def test_published_tensors_that_nothing_takes(version: WeightVersion) -> None:
    tensors = like()
    del tensors["stack"]
    with pytest.raises(UsageError, match="nothing in the model takes stack"):
        take(Holder(tensors), version)
    take(Holder(tensors), version, skips=["stack"])
