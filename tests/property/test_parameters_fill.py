"""Initial values are a function of seed, name and place alone: any region of any cut gets the bits that the whole tensor has there."""

from __future__ import annotations

import math
from typing import Any

import intarsia.parameters as parameters
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from intarsia.contracts import Box, Init, Member, Region
from intarsia.errors import PluginError
from intarsia.layout import region_numel, whole_region
from intarsia.parameters import CHUNK, ParameterInfo, ParameterTable, fill_region
from intarsia.plugins import current
from intarsia_placements.layouts import build_layouts
from intarsia_testing.layout import unpack

NORMAL = Init("normal", std=0.5, cut=2.0)
GOLDEN = [[-0.0868955, -0.2992217, 0.8317673], [-0.6794817, 0.4035105, -0.4212464]]


def filled(shape: tuple[int, ...], region: Region, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((region_numel(region),), math.nan, dtype=dtype)
    fill_region("layers.0.weight", shape, NORMAL, region, out, seed)
    return out


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_cut_gets_the_whole_tensors_bits(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 12), max_size=4)))
    ranks = data.draw(st.integers(1, 5))
    registry = current().registry("placement")
    name = data.draw(st.sampled_from(registry.names()))
    config = current().config_class(registry.find(name))
    placement = current().build(config(**({"tile": (2, 3)} if name == "block" else {})))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "CHUNK", data.draw(st.integers(1, 40)))
        whole = filled(shape, whole_region(shape)).view(shape)
        layout = build_layouts([Member("w", shape)], [("dp_shard", ranks, placement)])["w"]
        together = torch.full(shape, math.nan)
        for rank in range(ranks):
            unpack(filled(shape, layout.local(rank)), layout.local(rank), together)
        flat = filled((whole.numel(),), whole_region((whole.numel(),)))
    assert torch.equal(whole, together) and not whole.isnan().any()
    assert torch.equal(whole.flatten(), flat)


def test_only_the_chunks_that_are_needed_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    original = parameters._draw
    monkeypatch.setattr(parameters, "_draw", lambda text, length, init: drawn.append((text, length)) or original(text, length, init))
    shape = (3 * CHUNK // 1024 + 1, 1024)
    last = filled(shape, (Box((shape[0] - 1, 0), (1, 1024)),))
    assert drawn == [("1/layers.0.weight/3", 1024)]
    across = filled(shape, (Box((1023, 1000), (2, 24)),))
    assert [text for text, _ in drawn[1:]] == ["1/layers.0.weight/0", "1/layers.0.weight/1"]
    assert last.numel() == 1024 and not across.isnan().any()


def test_values_are_pinned() -> None:
    """Values that a seed has meant since the first release: if these move, no run can be repeated."""
    values = filled((2, 3), whole_region((2, 3)), seed=0).view(2, 3)
    golden = torch.tensor(GOLDEN)
    assert torch.allclose(values, golden, rtol=0, atol=1e-6), values.tolist()


def test_the_distribution_is_a_cut_normal() -> None:
    values = filled((CHUNK,), whole_region((CHUNK,)))
    assert values.abs().max() <= 1.0 and values.abs().max() > 0.99
    # A normal cut at 2 standard deviations has standard deviation 0.8796.
    assert abs(values.std().item() - 0.5 * 0.87963) < 2e-3 and abs(values.mean().item()) < 2e-3
    assert (values == values.abs().max()).sum() < 5


def test_seed_name_dtype_and_device_count() -> None:
    table = ParameterTable(seed=4)
    for name in ("a", "b"):
        table.add(ParameterInfo(name, (8,), "float32", NORMAL))
    region = whole_region((8,))

    def values(name: str, seed: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        out = torch.empty(8, dtype=dtype)
        table.fill(name, region, out, seed)
        return out

    assert torch.equal(values("a"), values("a", 4)) and not torch.equal(values("a"), values("a", 5))
    assert not torch.equal(values("a"), values("b"))
    assert torch.equal(values("a", dtype=torch.bfloat16), values("a").bfloat16())
    state = torch.get_rng_state()
    values("a")
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(PluginError, match="contiguous"):
        table.fill("a", region, torch.empty(4))
    for init, wanted in ((Init("zeros"), 0.0), (Init("ones"), 1.0), (Init("constant", value=2.5), 2.5)):
        out = torch.empty(8)
        fill_region("x", (8,), init, region, out, 0)
        assert out.tolist() == [wanted] * 8


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "CHUNK", 3 * 2**15 + 8)
    shape = (17, 30_011)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(filled(shape, whole_region(shape)))
    assert torch.equal(*found) and found[0].isfinite().all()
