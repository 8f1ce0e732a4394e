"""Conformance of weight transports. Subclass, name your entry, run pytest; a failure says which promise is broken, in words.

    class TestMine(WeightTransportConformance):
        entry = "my-distribution:mine"

The trainer's ranks are threads (`intarsia_testing.communicator.run_ranks`), each with its own transport; what they publish is read in this process.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from intarsia.comm import Communicator
from intarsia.config import MeshConfig
from intarsia.contracts import Box, Init, Regions
from intarsia.discovery import import_reference
from intarsia.errors import DistributedError, IntarsiaError, UsageError
from intarsia.layout import Layout, range_boxes, region_numel, region_parts, slices, whole_region
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable
from intarsia.plugins import current
from intarsia_rl.contracts import WeightTransport, WeightVersion
from intarsia_rl.weights import digest
from torch import Tensor, nn

from intarsia_testing.base import Conformance
from intarsia_testing.communicator import run_ranks
from intarsia_testing.promise import broken, keep

SHAPES: Mapping[str, tuple[int, ...]] = {
    "matrix": (9, 7),
    "stack": (2, 3, 5),
    "vector": (5,),
    "scalar": (),
    "nothing": (0, 4),
    "wide": (4, 3),
}
COMPUTE = "bfloat16"


class Small(nn.Module):
    """Parameters of awkward shapes that compute in bfloat16, one that keeps float32, and a persistent buffer."""

    keeps_float32: ClassVar[tuple[str, ...]] = ("wide",)

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            dtype = torch.float32 if name in self.keeps_float32 else getattr(torch, COMPUTE)
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))
        self.register_buffer("bias", torch.zeros(3))
        self.bias: Tensor

    def regions(self) -> Regions:
        """One block of nothing."""
        return Regions(blocks=())

    def inits(self) -> dict[str, Init]:
        """All normal."""
        return {name: Init("normal", std=1.0) for name in SHAPES} | {"bias": Init("zeros")}


class Trainer:
    """One rank of a trainer whose float32 masters are cut through rows: flat ranges, the last ranks holding nothing of small ones. A `ShardedModel` as far as publishing goes."""

    def __init__(self, world: Communicator) -> None:
        self.model, self.mesh = Small(), Mesh(check_mesh(MeshConfig(dp_shard=-1), world.size), world)
        self.table = ParameterTable.from_model(self.model, "float32", COMPUTE)
        self.table.mesh = self.mesh
        self.masters: dict[str, Tensor] = {}
        for name, info in self.table.items():
            info.layout = cut(info.shape, world.size)
            self.masters[name] = torch.zeros(region_numel(info.layout.local(world.rank)))
        self.train(0)

    def train(self, step: int) -> None:
        """Give everything the values of a step."""
        for name, whole in values(step).items():
            if name == "bias":
                self.model.bias.copy_(whole)
                continue
            layout = self.table[name].layout
            assert layout is not None
            for box, view in region_parts(self.masters[name], layout.local(self.mesh.world.rank), Box.whole(whole.shape)):
                view.copy_(whole[slices(box)])

    def parameters(self) -> Mapping[str, Tensor]:
        """The masters."""
        return self.masters

    @property
    def parts(self) -> dict[str, Any]:
        """As `Run.parts` has them."""
        return {"model": self.model, "parameters": self, "table": self.table, "mesh": self.mesh}


def cut(shape: Sequence[int], ranks: int) -> Layout:
    """Flat ranges of nearly equal length, an odd one first, as few boxes each."""
    numel = math.prod(shape)
    if not shape or not numel:
        regions = [whole_region(shape)] + [()] * (ranks - 1)
    else:
        borders = [numel * rank // ranks for rank in range(ranks + 1)]
        regions = [range_boxes(Box.whole(shape), low, high - low) for low, high in itertools.pairwise(borders)]
    return Layout.whole(shape).cut("dp_shard", regions)


def values(step: int) -> dict[str, Tensor]:
    """The masters of a step, whole: numbers that bfloat16 has to round."""
    generator = torch.Generator().manual_seed(step)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return found | {"bias": torch.randn(3, generator=generator)}


def published(step: int) -> dict[str, Tensor]:
    """What a version of these masters is."""
    wide = {"bias", *Small.keeps_float32}
    return {name: whole if name in wide else whole.to(getattr(torch, COMPUTE)) for name, whole in values(step).items()}


class WeightTransportConformance(Conformance):
    """Every promise of a weight transport, one test each.

    Set `entry`. `sizes` are the numbers of trainer ranks.
    """

    kind: ClassVar[str] = "weight transport"
    sizes: ClassVar[tuple[int, ...]] = (1, 3)

    def on_rank(self, folder: Path) -> WeightTransport:
        """The transport of one rank."""
        built: WeightTransport = current().build(self.given_configs()[0], folder)
        return built

    def trained(self, folder: Path, size: int, work: Callable[[Trainer, WeightTransport, _Reader], None]) -> None:
        """Run `work` on every rank; reading is rank 0's, and the others wait for it."""

        def rank(world: Communicator) -> None:
            transport = self.on_rank(folder)
            try:
                work(Trainer(world), transport, _Reader(transport, world))
                world.barrier("the end")
            finally:
                transport.close()

        run_ranks(size, rank)

    # ------------------------------------------------------------ promises

    def test_names_its_reader(self, tmp_path: Path) -> None:
        """`reader` is "module:function", on the target itself: a generator reads without building the transport."""
        target = current().target(self.found_entry())
        reference = getattr(target, "reader", None)
        keep("names its reader", isinstance(reference, str), f"the target {target!r} has no `reader`: make it a class with that attribute.")
        try:
            keep("names its reader", callable(import_reference(str(reference))), f"{reference!r} cannot be called.")
        except Exception as error:
            broken("names its reader", f"{reference!r} cannot be imported: {error}")

    def test_every_rank_publishes_its_part(self, tmp_path: Path) -> None:
        """What is read is the masters in the dtype that is computed with, whole, and rank 0 alone is told of the version."""

        def work(trainer: Trainer, transport: WeightTransport, reader: _Reader) -> None:
            version = transport.publish(0, trainer.parts)
            keep("rank 0", (version is not None) == (reader.world.rank == 0), f"rank {reader.world.rank} is given {version!r} by publish.")
            reader.compare("arrives whole", version, published(0))

        self._all(tmp_path, work)

    def test_a_version_says_what_it_holds(self, tmp_path: Path) -> None:
        """Digests, dtypes and shapes of every tensor; a location of plain JSON."""

        def work(trainer: Trainer, transport: WeightTransport, reader: _Reader) -> None:
            version = transport.publish(0, trainer.parts)
            if version is None:
                return
            expected = published(0)
            for name, whole in expected.items():
                found = version.digests.get(name)
                keep(
                    "digests",
                    found == digest.of_tensor(whole),
                    f"the digest of {name} is {found}, that of its bytes {digest.of_tensor(whole)}.",
                )
            dtypes = {name: str(whole.dtype).removeprefix("torch.") for name, whole in expected.items()}
            keep("dtypes", dict(version.dtypes) == dtypes, f"dtypes are {dict(version.dtypes)}, not {dtypes}.")
            shapes = {name: list(whole.shape) for name, whole in expected.items()}
            keep("shapes", {name: list(each) for name, each in version.shapes.items()} == shapes, f"shapes are {version.shapes}.")
            keep("location", json.loads(json.dumps(dict(version.location))) == version.location, f"{version.location} changes as JSON.")

        self._all(tmp_path, work)

    def test_gives_boxes(self, tmp_path: Path) -> None:
        """A reader that asks for boxes gets these, in order; tensors that it names no boxes of come whole."""
        boxes = {"matrix": [Box((2, 3), (5, 2)), Box((0, 0), (1, 7))], "stack": [Box((1, 0, 1), (1, 3, 3))]}

        def work(trainer: Trainer, transport: WeightTransport, reader: _Reader) -> None:
            version = transport.publish(0, trainer.parts)
            if version is None:
                return
            found = reader.read(version, ["stack", "vector", "matrix"], boxes)
            wanted = [("stack", boxes["stack"][0]), ("vector", Box.whole((5,))), *(("matrix", box) for box in boxes["matrix"])]
            keep(
                "boxes",
                [name for name, _ in found] == [name for name, _ in wanted],
                f"asked for {wanted}, got {[name for name, _ in found]}.",
            )
            for (name, box), (_, tensor) in zip(wanted, found, strict=True):
                expected = published(0)[name][slices(box)]
                same = tensor.dtype == expected.dtype and torch.equal(tensor, expected)
                keep("boxes", same, f"{box} of {name} is {tensor}, not {expected}.")

        self._all(tmp_path, work)

    def test_publishing_again_is_the_same(self, tmp_path: Path) -> None:
        """A version that is published already is given again, whatever the weights are by now."""

        def work(trainer: Trainer, transport: WeightTransport, reader: _Reader) -> None:
            first = transport.publish(0, trainer.parts)
            trainer.train(1)
            keep("the same again", transport.publish(0, trainer.parts) == first, "publishing version 0 again gave another version.")
            reader.compare("the same again", first, published(0))

        self._all(tmp_path, work)

    def test_training_goes_on(self, tmp_path: Path) -> None:
        """What was published does not change with the weights, nor with the next version while it is not retired."""

        def work(trainer: Trainer, transport: WeightTransport, reader: _Reader) -> None:
            first = transport.publish(0, trainer.parts)
            trainer.train(1)
            reader.compare("training goes on", first, published(0))
            second = transport.publish(1, trainer.parts)
            reader.compare("training goes on", first, published(0))
            reader.compare("training goes on", second, published(1))

        self._all(tmp_path, work)

    def test_many_versions(self, tmp_path: Path) -> None:
        """Version after version, each retired when the next is there; one that is retired is refused or still whole, never a mix."""

        def work(trainer: Trainer, transport: WeightTransport, reader: _Reader) -> None:
            versions = []
            for step in range(6):
                trainer.train(step)
                versions.append(transport.publish(step, trainer.parts))
                reader.compare("many versions", versions[-1], published(step))
                if step:
                    transport.retire(step - 1)
                for older in range(step):
                    reader.compare("never a mix", versions[older], published(older), may_fail=True)
                reader.world.barrier("read")

        self._all(tmp_path, work)

    def test_versions_go_up(self, tmp_path: Path) -> None:
        """An older version after a newer one is refused by UsageError, on every rank."""

        def work(trainer: Trainer, transport: WeightTransport, reader: _Reader) -> None:
            transport.publish(3, trainer.parts)
            try:
                transport.publish(2, trainer.parts)
            except UsageError:
                return
            broken("versions go up", "publish(2) after publish(3) raises no UsageError.")

        self._all(tmp_path, work)

    def test_unknown_tensors_are_refused(self, tmp_path: Path) -> None:
        """Reading a name that was not published is a UsageError that names it."""

        def work(trainer: Trainer, transport: WeightTransport, reader: _Reader) -> None:
            version = transport.publish(0, trainer.parts)
            if version is None:
                return
            try:
                reader.read(version, ["matrix", "matricks"])
            except UsageError as error:
                keep("unknown tensors", "matricks" in str(error), f"the message does not name the tensor: {error}")
                return
            broken("unknown tensors", "reading 'matricks' raises no UsageError.")

        self._all(tmp_path, work)

    def test_nothing_is_left(self, tmp_path: Path) -> None:
        """After close() on every rank the version cannot be read: DistributedError. close() may be called twice."""
        for size in self.sizes:
            kept: list[Any] = []

            def work(trainer: Trainer, transport: WeightTransport, reader: _Reader, kept: list[Any] = kept) -> None:
                kept.append((transport.publish(0, trainer.parts), reader))
                transport.close()

            self.trained(tmp_path, size, work)
            version, reader = next(pair for pair in kept if pair[0] is not None)
            try:
                reader.read(version, list(SHAPES))
            except DistributedError:
                continue
            except Exception as error:
                broken(
                    "nothing is left", f"reading after close() raises {type(error).__name__} ({error}) in the place of DistributedError."
                )
            broken("nothing is left", "the version can still be read after close().")

    def _all(self, folder: Path, work: Callable[[Trainer, WeightTransport, _Reader], None]) -> None:
        for size in self.sizes:
            self.trained(folder, size, work)


class _Reader:
    """The generator's side, on rank 0 of the trainer."""

    def __init__(self, transport: WeightTransport, world: Communicator) -> None:
        self._reference, self.world = transport.reader, world

    def read(
        self, version: WeightVersion, names: Sequence[str], boxes: Mapping[str, Sequence[Box]] | None = None
    ) -> list[tuple[str, Tensor]]:
        """Copies of what comes."""
        reading: Iterator[tuple[str, Tensor]] = import_reference(self._reference)(version.location, names, boxes)
        return [(name, tensor.clone()) for name, tensor in reading]

    def compare(self, promise: str, version: WeightVersion | None, expected: Mapping[str, Tensor], may_fail: bool = False) -> None:
        """Rank 0 reads all of it, and every rank waits until it has."""
        if version is not None:
            try:
                found = dict(self.read(version, list(expected)))
            except IntarsiaError as error:
                keep(promise, may_fail, f"version {version.version} cannot be read: {error}")
                found = dict(expected)
            for name, whole in expected.items():
                same = name in found and found[name].dtype == whole.dtype and torch.equal(found[name], whole)
                keep(promise, same, f"{name} of version {version.version} is {found.get(name)}, not {whole}.")
        self.world.barrier("read")
