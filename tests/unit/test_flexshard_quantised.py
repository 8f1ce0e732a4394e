"""Quantised payloads without processes: what every rank sends is laid end to end, as a gather does, and read back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from intarsia.contracts import Member
from intarsia.errors import PluginError, UsageError
from intarsia.layout import slices
from intarsia_flexshard import quantised
from intarsia_flexshard.plan import Geometry, make_geometry
from intarsia_flexshard.quantised import QuantisedPayload, reads_payload
from intarsia_flexshard.tiles import Tiles, best_tiles, dequantise_tiles, quantise_tiles
from intarsia_flexshard.wire import Wire, check_quantisation, make_wire, tile_of
from intarsia_float8.format import FORMAT, dequantise, quantise
from intarsia_models_common.build import Linear
from intarsia_models_common.scaled_linear import scaled_linear
from intarsia_placements import block, flat, owned, row
from intarsia_placements.config import Block, Flat, Owned, Row
from intarsia_placements.layouts import build_layouts
from torch import Tensor, nn

PLACEMENTS: dict[str, Any] = {
    "flat": flat.build(Flat()),
    "row": row.build(Row()),
    "columns": row.build(Row(dim=-1)),
    "block": block.build(Block(tile=(4, 4))),
    "owned": owned.build(Owned()),
}
TILE = (4, 4)
SHAPES = ((16, 8), (8,), (8, 8), (1, 3), (), (3, 12, 8), (0, 4))
# Members that their modules read as float8: matrices and a stack.
READ = (0, 2, 5)


class Reader(nn.Module):
    """A module that says it reads float8."""

    reads_payload = ("weight",)


@dataclasses.dataclass
class Rank:
    payload: QuantisedPayload
    parameters: list[nn.Parameter]
    owners: list[list[tuple[nn.Module, str]]]
    shard: Tensor

    def arrive(self, everything: Tensor) -> None:
        self.payload.arrival.copy_(everything)
        self.payload.decode()


def plan(placement: Any, ranks: int, shapes: Any = SHAPES, tile: tuple[int, int] = TILE) -> tuple[Geometry, Wire]:
    members = [Member(str(index), shape, tile=tile_of(shape, tile)) for index, shape in enumerate(shapes)]
    layouts = build_layouts(members, [("dp_shard", ranks, placement)])
    regions = [[layouts[member.name].local(rank) for member in members] for rank in range(ranks)]
    geometry = make_geometry(shapes, regions, 64)
    return geometry, make_wire(geometry, [member.tile for member in members], 2)


def shard_of(geometry: Geometry, rank: int, full: list[Tensor]) -> Tensor:
    shard = torch.zeros(geometry.counts[rank], dtype=full[0].dtype)
    for region, offset, values in zip(geometry.regions[rank], geometry.offsets[rank], full, strict=True):
        for box in region:
            shard[offset : offset + box.numel] = values[slices(box)].flatten()
            offset += box.numel
    return shard


def make_ranks(
    placement: Any, ranks: int, full: list[Tensor], read: Any = READ, power_of_two: bool = False, tile: Any = TILE
) -> list[Rank]:
    shapes = tuple(tuple(values.shape) for values in full)
    geometry, wire = plan(placement, ranks, shapes, tile)
    found = []
    for rank in range(ranks):
        parameters = [nn.Parameter(torch.empty(0, dtype=torch.bfloat16)) for _ in shapes]
        owners: Any = [[(Reader() if member in read else nn.Module(), "weight")] for member in range(len(shapes))]
        shard = shard_of(geometry, rank, full)
        sent = torch.full((wire.counts[rank],), 255, dtype=torch.uint8)
        payload = QuantisedPayload(wire, geometry, rank, shard, sent, parameters, owners, torch.bfloat16, tile, power_of_two)
        payload.bind(*(torch.full((size,), 255, dtype=torch.uint8) for size in (payload.whole_bytes, payload.staged_bytes)))
        found.append(Rank(payload, parameters, owners, shard))
    return found


def gather(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.payload.encode()
    everything = torch.cat([rank.payload.send() for rank in ranks])
    for rank in ranks:
        rank.arrive(everything)


def random(shapes: Any = SHAPES, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
    )


@pytest.mark.parametrize("power_of_two", (False, True))
@pytest.mark.parametrize("ranks", (1, 2, 3, 8))
@pytest.mark.parametrize("name", PLACEMENTS)
def test_what_arrives_is_bit_for_bit_the_whole_quantised(name: str, ranks: int, power_of_two: bool) -> None:
    """Gathering float8 equals gathering bfloat16 and quantising it then, whoever holds what."""
    full = random()
    found = make_ranks(PLACEMENTS[name], ranks, full, power_of_two=power_of_two)
    gather(found)
    for rank in found:
        for member, values in enumerate(full):
            rounded, parameter = values.bfloat16(), rank.parameters[member]
            assert parameter.shape == values.shape
            if values.dim() not in (2, 3):
                assert torch.equal(parameter, rounded)
                continue
            payload, scales = quantise(rounded, TILE, power_of_two)
            if member in READ:
                module: Any = rank.owners[member][0][0]
                assert same_bits(module.weight_payload, payload) and same_bits(module.weight_scales, scales) and module.weight_tile == TILE
                assert parameter.isnan().all() and parameter.untyped_storage().nbytes() == 2
            else:
                assert same_bits(parameter.data, dequantise(payload, scales, TILE, torch.bfloat16))


def test_several_buffers_and_every_payload_read_nowhere() -> None:
    """A bucket may move to other memory; matrices that nobody reads as float8 are dequantised, and need no place for what arrives."""
    full = random()
    found = make_ranks(PLACEMENTS["flat"], 2, full, read=())
    gather(found)
    first = [parameter.detach().clone() for parameter in found[0].parameters]
    elements = sum(values.numel() for values in full if values.dim() in (2, 3))
    assert found[0].payload.whole_bytes < 2 * elements + 128 * len(full)
    payload = found[0].payload
    payload.bind(*(torch.full((size,), 255, dtype=torch.uint8) for size in (payload.whole_bytes + 512, payload.staged_bytes + 512)))
    gather(found)
    assert all(same_bits(one, other.data) for one, other in zip(first, found[0].parameters, strict=True))


# A block of Llama 3 8B.
LLAMA = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336), (4096,), (4096,))


@pytest.mark.parametrize("ranks", (2, 4, 8))
@pytest.mark.parametrize("name", ("flat", "row", "owned"))
def test_bytes_are_half_of_bfloat16_and_shares_true(name: str, ranks: int) -> None:
    geometry, wire = plan(PLACEMENTS[name], ranks, LLAMA, (128, 128))
    assert sum(wire.counts) <= 0.51 * 2 * geometry.elements
    if name == "owned":
        true = [sum(math.prod(shape) for shape, region in zip(LLAMA, row, strict=True) if region) for row in geometry.regions]
        assert all(count <= 1.02 * size + 32768 for count, size in zip(wire.counts, true, strict=True))
    else:
        assert len(set(wire.counts)) == 1 or max(wire.counts) <= 1.02 * min(wire.counts) or name == "flat"


def test_whole_matrices_are_views_of_what_two_ranks_gather() -> None:
    """Scales stand where no payload is cut: of a block only the scales of the matrix on the border are copied."""
    _, wire = plan(PLACEMENTS["flat"], 2, LLAMA, (128, 128))
    copied = [item for item in wire.items if item.start is None]
    assert [(item.member, item.kind) for item in copied] == [(5, "scales")]
    assert all(item.start % 128 == 0 for item in wire.items if item.kind == "payload" and item.start is not None)
    assert all(item.start % 16 == 0 for item in wire.items if item.start is not None)


def test_misaligned_compaction_with_an_empty_rank() -> None:
    """Eight ranks, tiles of 4 x 4, sizes that are no multiples: contiguous results, bit for bit those of the reference."""
    full = random(((16, 8), (8, 8), (1, 3)))
    found = make_ranks(PLACEMENTS["flat"], 8, full, read=(0, 1, 2))
    assert 0 in found[0].payload.counts
    gather(found)
    for member, values in enumerate(full):
        module: Any = found[7].owners[member][0][0]
        payload, scales = quantise(values.bfloat16(), TILE)
        assert same_bits(module.weight_payload, payload) and same_bits(module.weight_scales, scales)
        assert module.weight_payload.is_contiguous() and module.weight_scales.is_contiguous()


def test_masters_are_quantised_from_the_compute_dtype_once_for_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers in between, such as a recomputation's, send what is there; the next encode sees every change, whoever made it."""
    calls = []

    def counted(*arguments: Any) -> None:
        calls.append(arguments)
        quantise_tiles(*arguments)

    monkeypatch.setattr(quantised, "best_tiles", lambda device: Tiles(counted, dequantise_tiles))
    found = make_ranks(PLACEMENTS["flat"], 2, random())
    gather(found)
    assert len(calls) == 2
    before = found[0].payload.send().clone()
    assert torch.equal(found[0].payload.send(), before) and len(calls) == 2
    found[0].shard.data[0] += 64  # `.data`: no version counter moves
    found[0].payload.encode()
    assert not torch.equal(found[0].payload.send(), before) and len(calls) == 3
    assert found[0].shard.dtype == torch.float32 and calls[0][5] == torch.bfloat16


def test_another_kernel_may_write_the_wire() -> None:
    """What `wire_views` gives is all that is needed to quantise."""
    found = make_ranks(PLACEMENTS["flat"], 2, random())
    gather(found)
    wanted = found[1].payload.send().clone()
    found[1].payload.send().zero_()
    views = found[1].payload.wire_views()
    quantise_tiles(*views)
    found[1].payload.encode_values()
    assert torch.equal(found[1].payload.send(), wanted) and views.values.data_ptr() == found[1].shard.data_ptr()


def test_gathers_do_not_disturb_what_autograd_has_saved() -> None:
    """A later gather refills the memory that a backward pass reads, and autograd does not take that for a change."""
    full = random(((16, 8),))
    found = make_ranks(PLACEMENTS["row"], 2, full, read=(0,))
    gather(found)
    module: Any = found[0].owners[0][0][0]
    x = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    y = scaled_linear(x, found[0].parameters[0], module.weight_payload, module.weight_scales, None, TILE)
    gather(found)
    y.sum().backward()
    weight = dequantise(*quantise(full[0].bfloat16(), TILE), TILE, torch.bfloat16)
    assert torch.equal(x.grad, torch.ones_like(y) @ weight)
    gradient = found[0].parameters[0].grad
    assert gradient is not None and gradient.is_contiguous() and gradient.shape == (16, 8)


def test_poisoned_parameters_read_nan_until_they_are_gathered_again() -> None:
    full = random()
    found = make_ranks(PLACEMENTS["flat"], 2, full)
    gather(found)
    found[0].payload.poison()
    module: Any = found[0].owners[0][0][0]
    assert dequantise(module.weight_payload, module.weight_scales, TILE, torch.float32).isnan().all()
    assert all(parameter.isnan().all() for parameter in found[0].parameters)
    gather(found)
    assert dequantise(module.weight_payload, module.weight_scales, TILE, torch.float32).isfinite().all()


def test_who_reads_float8() -> None:
    linear = Linear(8, 8, 1.0)
    assert reads_payload([(linear, "weight")]) and not reads_payload([(linear, "bias")]) and not reads_payload([])
    assert not reads_payload([(linear, "weight"), (nn.Embedding(8, 8), "weight")])


def test_a_linear_layer_reads_the_bytes_and_its_parameter_takes_the_gradient() -> None:
    torch.manual_seed(0)
    layer, weight = Linear(300, 200, 1.0, bias=True).to(torch.float64), torch.randn(200, 300)
    layer.weight_payload, layer.weight_scales = quantise(weight, (128, 128))
    nn.init.normal_(layer.bias)
    layer.weight.data = torch.full((), math.nan, dtype=torch.float64).expand(200, 300)
    x = torch.randn(2, 3, 300, dtype=torch.float64, requires_grad=True)
    wide = dequantise(layer.weight_payload, layer.weight_scales, (128, 128), torch.float64).requires_grad_()
    leaves = (x, layer.weight, layer.bias)
    got = layer(x), *torch.autograd.grad(layer(x).square().sum(), leaves)
    plain = torch.nn.functional.linear(x, wide, layer.bias)
    wanted = plain, *torch.autograd.grad(plain.square().sum(), (x, wide, layer.bias))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert not any(name.startswith("weight_") for name in layer.state_dict())


def test_a_compiled_block_reads_the_bytes() -> None:
    layer, weight = Linear(16, 8, 1.0), torch.randn(8, 16)
    layer.weight_payload, layer.weight_scales = quantise(weight, (128, 128))
    layer.weight.data = torch.full((), math.nan).expand(8, 16)
    x = torch.randn(4, 16, requires_grad=True)
    compiled: Any = torch.compile(lambda x: layer(x).relu(), backend="aot_eager", fullgraph=True)
    wanted = torch.autograd.grad(layer(x).relu().sum(), (x, layer.weight))
    for one, other in zip(torch.autograd.grad(compiled(x).sum(), (x, layer.weight)), wanted, strict=True):
        torch.testing.assert_close(one, other)


# ---------------------------------------------------------------- the format


def test_a_scaled_weight_is_data_times_scale() -> None:
    data = torch.randint(-8, 8, (16, 8)).float()
    found = dequantise(data.to(FORMAT), torch.full((4, 2), 0.5), TILE, torch.bfloat16)
    assert found.dtype == torch.bfloat16 and torch.equal(found.float(), data * 0.5)


@pytest.mark.parametrize("power_of_two", (False, True))
def test_the_quantiser_against_its_formula(power_of_two: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(10, 7) * torch.logspace(-6, 6, 7)
    payload, scales = quantise(values, (4, 3), power_of_two)
    for o in range(3):
        for i in range(3):
            tile = values[4 * o : 4 * o + 4, 3 * i : 3 * i + 3]
            scale = torch.tensor(max(float(tile.abs().max()), 1e-12) / 448.0)
            if power_of_two:
                scale = torch.exp2(torch.ceil(torch.log2(scale)))
            assert float(scales[o, i]) == float(scale)
            assert same_bits(payload[4 * o : 4 * o + 4, 3 * i : 3 * i + 3].contiguous(), (tile * (1 / scale)).clamp(-448, 448).to(FORMAT))
    assert float((dequantise(payload, scales, (4, 3), torch.float32) - values).norm() / values.norm()) < 0.04


def test_the_quantiser_at_the_edges() -> None:
    payload, scales = quantise(torch.zeros(4, 4), TILE)
    assert float(scales) == pytest.approx(1e-12 / 448) and not payload.float().any()
    exact = torch.tensor([[448.0, 1.0]])
    assert float(quantise(exact, (1, 2), True)[1]) == 1.0
    for bad in (math.nan, math.inf):
        for power_of_two in (False, True):
            values = torch.ones(4, 8)
            values[1, 1] = bad
            restored = dequantise(*quantise(values, TILE, power_of_two), TILE, torch.float32)
            assert not restored[:, :4].isfinite().any() and torch.equal(restored[:, 4:].round(), torch.ones(4, 4))


def test_kernels_are_asked_for_only_on_devices_that_have_them() -> None:
    assert best_tiles("cpu") == Tiles(quantise_tiles, dequantise_tiles)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("tile", ((128,), (0, 128), (128, -1), (4, 4, 4)))
def test_tiles_that_mean_nothing(tile: Any) -> None:
    with pytest.raises(UsageError, match=r"sharder\.tile must be two sizes"):
        check_quantisation(tile, "float32")


def test_unknown_scales_have_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'power_of_two'"):
        check_quantisation((128, 128), "power_of_2")
    check_quantisation((128, 128), "power_of_two")


def test_a_cut_through_a_tile_is_refused() -> None:
    members = [Member("0", (8, 8))]
    layouts = build_layouts(members, [("dp_shard", 8, PLACEMENTS["row"])])
    geometry = make_geometry([(8, 8)], [[layouts["0"].local(rank)] for rank in range(8)], 64)
    with pytest.raises(PluginError, match=r"inside a tile of \(4, 4\)"):
        make_wire(geometry, [TILE], 2)


def test_only_matrices_and_stacks_of_them_have_tiles() -> None:
    assert [tile_of(shape, TILE) for shape in ((), (8,), (8, 8), (3, 8, 8), (2, 3, 8, 8))] == [None, None, (4, 4), (1, 4, 4), None]
