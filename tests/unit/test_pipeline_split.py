"""Where a model is cut into stages, and what stays of it on a rank."""

from __future__ import annotations

import itertools
from typing import Any

import chz
import pytest
import torch
from _pipeline import model_of, recipe_of
from hypothesis import given, settings
from hypothesis import strategies as st
from intarsia.contracts import Regions
from intarsia.errors import PluginError, UsageError
from intarsia.mesh import Mesh, check_mesh
from intarsia_deepseek_v3.config import debug
from intarsia_deepseek_v3.model import DeepSeekV3
from intarsia_pipeline import split as splitting
from intarsia_pipeline.split import Costs, balanced, explicit, split
from intarsia_testing.communicator import run_ranks
from torch import nn


def regions(count: int, *stages: int) -> Regions:
    return Regions(tuple(f"layers.{number}" for number in range(count)), stages=tuple(f"layers.{number}" for number in stages))


def stages_of(cuts: list[int], count: int) -> list[range]:
    bounds = [0, *cuts, count]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(0, 60), st.integers(0, 60), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_the_costliest_stage_is_as_cheap_as_can_be(blocks: list[int], before: int, after: int, stages: int) -> None:
    costs = Costs(tuple(map(float, blocks)), float(before), float(after))
    if stages > len(blocks):
        with pytest.raises(UsageError, match=f"at most {len(blocks)} stages"):
            balanced(regions(len(blocks)), costs, stages)
        return

    def every(count: int, left: int) -> list[list[int]]:
        if left == 1:
            return [[]]
        return [[cut, *rest] for cut in range(1, count) for rest in every_from(cut, count, left - 1)]

    def every_from(begin: int, count: int, left: int) -> list[list[int]]:
        if left == 1:
            return [[]]
        return [[cut, *rest] for cut in range(begin + 1, count) for rest in every_from(cut, count, left - 1)]

    def worst(cuts: list[int]) -> float:
        return max(costs.stage(each.start, each.stop) for each in stages_of(cuts, len(blocks)))

    found = balanced(regions(len(blocks)), costs, stages)
    assert len(found) == stages - 1 and all(len(each) for each in stages_of(found, len(blocks)))
    assert worst(found) == min(map(worst, every(len(blocks), stages)))


def test_even_blocks_are_dealt_out_evenly() -> None:
    """Among equally good cuts the ones whose stages differ least."""
    assert [len(each) for each in stages_of(balanced(regions(10), Costs((1.0,) * 10, 0.0, 0.0), 4), 10)].count(3) == 2
    # A head as dear as two blocks.
    assert balanced(regions(10), Costs((1.0,) * 10, 0.0, 2.0), 4) == [3, 6, 9]


def test_declared_boundaries() -> None:
    assert balanced(regions(8, 2, 6), Costs((1.0,) * 8, 0.0, 0.0), 3) == [2, 6]
    with pytest.raises(UsageError, match=r"may be cut before 2 of its 8 blocks: at most 3 stages"):
        balanced(regions(8, 2, 6), Costs((1.0,) * 8, 0.0, 0.0), 4)
    with pytest.raises(PluginError, match=r"names 'layers.9', which is no block"):
        balanced(regions(8, 9), Costs((1.0,) * 8, 0.0, 0.0), 2)


def test_explicit_lists() -> None:
    assert explicit(regions(8), ("layers.3", "layers.5"), 3) == [3, 5]
    assert explicit(regions(8), ("layers.0", "layers.3", "layers.5"), 3) == [3, 5]
    with pytest.raises(UsageError, match=r"names 'layers.33', which is no block of the model. Did you mean 'layers.3'"):
        explicit(regions(8), ("layers.33",), 2)
    with pytest.raises(UsageError, match="in the model's order, each once"):
        explicit(regions(8), ("layers.5", "layers.3"), 3)
    with pytest.raises(UsageError, match="makes 2 stages, and the schedule has 3 on this mesh: name 3 blocks, or 2 without the first"):
        explicit(regions(8), ("layers.5",), 3)
    with pytest.raises(UsageError, match=r"may not be cut before 'layers.5'.*Nearest blocks where it may: 'layers.6', 'layers.2'"):
        explicit(regions(8, 2, 6), ("layers.5",), 2)


def parts(recipe: Any, ranks: int, **more: Any) -> list[Any]:
    def work(world: Any) -> Any:
        mesh = Mesh(check_mesh(chz.replace(recipe.mesh, pp=ranks, dp_shard=1), world.size), world)
        model, table = model_of(recipe.model, streams=False)
        return split(model, table, mesh, recipe, **more), model, table

    return run_ranks(ranks, work)


def test_only_the_own_part_stays_and_all_of_it_is_on_the_meta_device() -> None:
    found = parts(recipe_of("1f1b", 4, layers=4, tied=True), 2)
    names = [sorted(table) for _, _, table in found]
    assert all("tok_embeddings.weight" in each for each in names)
    assert {name.rpartition(".")[0] for each in names for name in each if name.startswith("norm")} == {"norm"}
    for rank, (part, model, table) in enumerate(found):
        assert all(parameter.is_meta for parameter in model.parameters())
        assert [layer is None for layer in model.layers] == ([False, False, True, True] if rank == 0 else [True, True, False, False])
        assert (model.tok_embeddings is None, model.norm is None, model.head is None) == (
            (False, True, True) if rank == 0 else (True, False, False)
        )
        assert set(model.regions().blocks) == set(part.stages[0].blocks)
        assert table["tok_embeddings.weight"].is_copy == (rank == 1)
        assert [tie.ranks for tie in part.ties] == [(0, 1)] and [tie.here for tie in part.ties] == [
            ("tok_embeddings.weight", "head.weight")[rank]
        ]
        assert table.total["parameters"] == sum(
            each.numel() for each in model_of(recipe_of(layers=4, tied=True).model, False)[0].parameters()
        )


def test_virtual_stages_lie_as_the_schedule_says() -> None:
    found = parts(recipe_of("zbv", 4, layers=8), 2)
    assert [[stage.blocks for stage in part.stages] for part, _, _ in found] == [
        [("layers.0", "layers.1"), ("layers.6", "layers.7")],
        [("layers.2", "layers.3"), ("layers.4", "layers.5")],
    ]
    assert [(part.stages[0].first, part.stages[1].last) for part, _, _ in found] == [(True, True), (False, False)]
    assert found[0][1].head is not None and found[1][1].head is None


def test_an_explicit_split() -> None:
    found = parts(recipe_of("1f1b", 4, layers=4), 2, stages=("layers.3",))
    assert [part.stages[0].blocks for part, _, _ in found] == [("layers.0", "layers.1", "layers.2"), ("layers.3",)]
    assert found[0][0].costs == found[1][0].costs and found[0][0].costs[0] > found[0][0].costs[1]


def test_another_engine_is_refused() -> None:
    from intarsia_eager.config import EagerConfig

    recipe = chz.replace(recipe_of("1f1b", 4), engine=EagerConfig())
    with pytest.raises(UsageError, match=r"mesh.pp is 2, and the engine is `eager`.*engine=pipeline"):
        parts(recipe, 2)


class Shared(nn.Module):
    """An embedding that both ends use."""

    def __init__(self, says: bool, orphan: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
        self.out = nn.Linear(2, 2)
        if orphan:
            self.extra = nn.Linear(2, 2)
        if says:
            self.stage_modules = lambda: (("embedding",), ("embedding", "out"))

    def regions(self) -> Regions:
        return Regions(("blocks.0", "blocks.1"))


def test_a_model_says_what_its_ends_need() -> None:
    from intarsia.contracts import StagePart

    stages = [StagePart(0, True, False, ("blocks.0",)), StagePart(1, False, True, ("blocks.1",))]
    with torch.device("meta"):
        plain, says, orphan = Shared(False), Shared(True), Shared(True, orphan=True)
    owners = splitting.owners_of(plain, plain.regions(), stages)
    assert (owners["embedding.weight"], owners["blocks.1.weight"], owners["out.bias"]) == ({0}, {1}, {1})
    assert splitting.owners_of(says, says.regions(), stages)["embedding.weight"] == {0, 1}
    with pytest.raises(PluginError, match=r"no pipeline stage has the parameter 'extra.weight'"):
        splitting.owners_of(orphan, orphan.regions(), stages)


def test_the_head_costs_once_for_each_depth() -> None:
    """Two depths more multiply by the output projection twice more; their blocks count among the blocks."""
    found = []
    for depths in (0, 2):
        config = debug()
        with torch.device("meta"):
            model = DeepSeekV3(chz.replace(config, ahead=config.ahead * depths))
        found.append(Costs.of(model, model.regions(), 64))
    assert found[1].after - found[0].after == 2 * 2.0 * config.vocab_size * config.dim
    assert len(found[1].blocks) == len(found[0].blocks) + 2
