"""What vision parts promise beside parity: layouts of patches, exact checks, no patches at all, FLOPs, what a pipeline may cut."""

from __future__ import annotations

import math

import pytest
import torch
from intarsia.config import CompileConfig, RecomputeConfig
from intarsia.errors import PluginError, UsageError
from intarsia_eager.context import TrainContext
from intarsia_eager.engine import prepare_regions, recomputed_blocks
from intarsia_models_common.base import LanguageModel
from intarsia_models_common.build import Scope
from intarsia_models_common.config import AttentionConfig, BlockConfig, SwiGLUConfig
from intarsia_models_common.vision import grids as sizes
from intarsia_models_common.vision.base import VisionLanguageModel, check_order, pick
from intarsia_models_common.vision.config import VisionConfig, VisionLanguageModelConfig
from intarsia_models_common.vision.flops import tower_flops
from intarsia_models_common.vision.operators import LAYER_NORM, SEGMENT_ATTENTION
from intarsia_models_common.vision.tower import VisionTower
from intarsia_pipeline.split import Costs, balanced, flops
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

IDS = {"image_id": 60, "video_id": 61, "vision_start_id": 62, "vision_end_id": 63}


def vision(**further) -> VisionConfig:
    return VisionConfig(
        **{"depth": 2, "dim": 16, "hidden": 24, "heads": 2, "out_dim": 32, "patch": 2, "table": 3, "deepstack": (0, 1), **further}
    )


def config(tower: VisionConfig | None = None, layers: int = 3, **further) -> VisionLanguageModelConfig:
    block = BlockConfig(attention=AttentionConfig(heads=4, kv_heads=2, head_dim=8), feed_forward=SwiGLUConfig(hidden=36))
    return VisionLanguageModelConfig(vocab_size=64, dim=32, max_positions=64, layers=(block,) * layers, vision=tower, **{**IDS, **further})


def filled(model: torch.nn.Module, scale: float = 0.2) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


class Context(TrainContext):
    """One document to a row, with what a loader added."""

    def __init__(self, tokens: int, **extra):
        super().__init__(torch.arange(tokens)[None])
        self.extra = extra


def tower(**further) -> VisionTower:
    return filled(VisionTower(vision(**further), Scope("visual", 16, -1, 1, False, 0.02, 0.02)))


# ---------------------------------------------------------------- layouts


def test_patches_lie_in_merge_blocks():
    found = sizes.layout(((1, 4, 4),), 5, 2).places_N2.tolist()
    assert found[:8] == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert sorted(map(tuple, found)) == [(row, column) for row in range(4) for column in range(4)]
    assert sizes.layout(((1, 6, 2),), 5, 2).places_N2[4:8].tolist() == [[2, 0], [2, 1], [3, 0], [3, 1]]


@pytest.mark.parametrize(("rows", "columns", "table"), [(4, 6, 5), (2, 2, 48), (8, 2, 3), (1, 7, 4), (1, 1, 6), (3, 5, 1)])
def test_positions_are_those_of_torchs_interpolation(rows, columns, table):
    found = sizes.layout(((1, rows, columns),), table, 1)
    entries = torch.randn(table * table, 3, dtype=torch.float64)
    mine = (entries[torch.from_numpy(found.entries_4N)] * torch.from_numpy(found.weights_4N)[..., None]).sum(0)
    image = entries.T.reshape(1, 3, table, table)
    expected = torch.nn.functional.interpolate(image, (rows, columns), mode="bilinear", align_corners=True)[0].flatten(1).T
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_frames_are_segments_of_their_own():
    found = sizes.layout(((3, 2, 4), (1, 2, 2)), 4, 2)
    assert found.lengths == (8, 8, 8, 4)
    assert found.entries_4N.shape == (4, 28)
    assert (found.entries_4N[:, :8] == found.entries_4N[:, 16:24]).all()


@pytest.mark.parametrize("grids", [((1, 3, 4),), ((1, 4, 4), (1, 4, 5))])
def test_sides_are_multiples_of_merge(grids):
    with pytest.raises(UsageError, match="multiples of 2"):
        sizes.checked(grids, 2)


@pytest.mark.parametrize("grid", [(0, 2, 2), (1, 0, 2), (1, 2), (1, 2, 2, 2), (1, -2, 2)])
def test_a_grid_has_three_sizes(grid):
    with pytest.raises(UsageError, match="frames, rows and columns"):
        sizes.checked((grid,), 2)


# ---------------------------------------------------------------- the tower


def test_images_together_are_images_apart():
    model = tower()
    grids = ((1, 4, 6), (2, 2, 2), (1, 2, 2))
    patches = torch.randn(36, model.config.values)
    together = model(patches, grids)
    apart = [model(part, (grid,)) for part, grid in zip(patches.split([24, 8, 4]), grids, strict=True)]
    torch.testing.assert_close(together[0], torch.cat([each[0] for each in apart]), rtol=1e-5, atol=1e-6)
    for k in range(2):
        torch.testing.assert_close(together[1][k], torch.cat([each[1][k] for each in apart]), rtol=1e-5, atol=1e-6)


def test_no_patches_give_gradients_of_zeros():
    model = tower()
    features, deepstack = model(torch.zeros(0, model.config.values), ())
    assert [tuple(each.shape) for each in (features, *deepstack)] == [(0, 32)] * 3
    rows = torch.full((2, 5), -1)
    sum(pick(each, rows, torch.float32).sum() for each in (features, *deepstack)).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_bfloat16_is_near_float32():
    model, grids = tower(), ((1, 8, 6), (2, 4, 4))
    patches = torch.randn(80, model.config.values)
    exact = model(patches, grids)[0]
    rounded = model.bfloat16()(patches, grids)[0]
    assert rounded.dtype == torch.bfloat16
    assert model.rope.frequencies_d.dtype == torch.float32
    assert (rounded.float() - exact).norm() < 0.03 * exact.norm()


def test_patches_of_another_size_are_refused():
    with pytest.raises(UsageError, match=r"\[4, 12\].*patches of 24 values"):
        tower()(torch.zeros(4, 12), ((1, 2, 2),))
    with pytest.raises(UsageError, match=r"8 patches.*speak of 4"):
        tower()(torch.zeros(8, 24), ((1, 2, 2),))


def test_operators():
    q, k, v = (torch.randn(9, 2, 72, dtype=torch.float64) for _ in range(3))
    found = SEGMENT_ATTENTION(q, k, v, (5, 0, 4), scale=0.1)
    for begin, end in ((0, 5), (5, 9)):
        scores = torch.einsum("shd,thd->hst", q[begin:end], k[begin:end]) * 0.1
        torch.testing.assert_close(found[begin:end], torch.einsum("hst,thd->shd", scores.softmax(-1), v[begin:end]))
    with pytest.raises(PluginError, match="8 rows together were given 9"):
        SEGMENT_ATTENTION(q, k, v, (5, 3), scale=0.1)
    x = torch.randn(3, 7, dtype=torch.bfloat16) * 9 + 5
    wide = x.double()
    expected = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt() * 2 + 1
    found = LAYER_NORM(x, torch.full((7,), 2.0).bfloat16(), torch.ones(7).bfloat16(), 1e-6)
    assert (found.double() - expected).abs().max() < 2**-7 * expected.abs().max()


def test_flops_are_those_that_torch_counts():
    model, grids = tower(depth=3), ((1, 4, 6), (2, 8, 4))
    # torch counts nothing for its fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        model(torch.randn(88, 24), grids)
    assert tower_flops(model.config, grids) == pytest.approx(counted.get_total_flops(), rel=1e-6)
    whole = VisionLanguageModel(config(vision(depth=3)))
    assert whole.media_flops({"grids": grids}) == pytest.approx(3 * counted.get_total_flops(), rel=1e-6)
    assert whole.media_flops({}) == VisionLanguageModel(config()).media_flops({"grids": grids}) == 0.0


@pytest.mark.parametrize(("frozen", "passes"), [("", (3, 3)), ("visual", (1, 1)), ("trunk", (1, 3)), ("mergers", (3, 2))])
def test_flops_of_what_is_frozen_are_those_of_its_passes(frozen, passes):
    """Patches have no gradient: what is frozen and has nothing that trains before it is run forward alone."""
    model, grids = VisionLanguageModel(config(vision(depth=3, deepstack=(1,)))), ((1, 4, 6), (2, 8, 4))
    for name, parameter in model.visual.named_parameters():
        merges = name.startswith(("merger", "deepstack"))
        parameter.requires_grad_(not {"": False, "visual": True, "trunk": not merges, "mergers": merges}[frozen])
    expected = tower_flops(model.config.vision, grids, *passes)
    assert model.media_flops({"grids": grids}) == expected
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        features, deepstack = model.visual(torch.randn(88, 24), grids)
        if features.requires_grad:
            (features.sum() + deepstack[0].sum()).backward()
    # The first projection's input has no gradient.
    assert counted.get_total_flops() <= expected * (1 + 1e-6) and counted.get_total_flops() > 0.9 * expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3}, "vision.dim = 16 over vision.heads = 3"),
        ({"dim": 12, "heads": 2}, "multiple of 4"),
        ({"deepstack": (2,)}, "blocks of the tower"),
        ({"deepstack": (1, 0)}, "rising"),
        ({"merge": 0}, "vision.merge"),
        ({"eps": math.nan}, "vision.eps"),
        ({"share": 1.5}, "vision.share"),
        ({"recompute": "allways"}, "vision.recompute is 'allways'.*always"),
    ],
)
def test_towers_that_cannot_be(fields, message):
    with pytest.raises(UsageError, match=message):
        vision(**fields)


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tower": vision(out_dim=16)}, "out_dim = 16, and model.dim = 32"),
        ({"tower": vision(), "layers": 1}, "deepstack has 2 entries"),
        ({"tower": vision(), "layers": 2, "image_id": 64}, "model.image_id = 64"),
        ({"tower": vision(), "layers": 2, "image_id": 61}, "a token of its own"),
    ],
)
def test_models_that_cannot_be(fields, message):
    with pytest.raises(UsageError, match=message):
        config(**fields)


def test_without_images_it_is_a_language_model():
    seeing, blind = filled(VisionLanguageModel(config(vision()))), LanguageModel(config())
    blind.load_state_dict({name: value for name, value in seeing.state_dict().items() if not name.startswith("visual.")})
    tokens = torch.randint(60, (1, 9))
    assert torch.equal(seeing(tokens, Context(9)), blind(tokens, Context(9)))
    nothing = {"patches_NC": torch.zeros(0, 24), "grids": (), "visual_BS": torch.full((1, 9), -1)}
    assert torch.equal(seeing(tokens, Context(9, **nothing)), blind(tokens, Context(9)))
    assert seeing.flops_per_token(64) == blind.flops_per_token(64)


def test_features_take_the_places_of_tokens():
    model = filled(VisionLanguageModel(config(vision(), layers=2)), 0.5)
    tokens, visual = torch.randint(60, (2, 6)), torch.tensor([[-1, 0, 1, -1, -1, -1], [-1, -1, -1, 2, -1, -1]])
    extra = {"patches_NC": torch.randn(12, 24), "grids": ((1, 2, 4), (1, 2, 2)), "visual_BS": visual}
    context = Context(6, **extra)
    features, deepstack = model.visual(extra["patches_NC"], extra["grids"])
    x = model.tok_embeddings(tokens)
    x[visual >= 0] = features
    for k, layer in enumerate(model.layers):
        x = layer(x, model.shared(context), context)
        x[visual >= 0] += deepstack[k]
    torch.testing.assert_close(model(tokens, context), model.norm(x), rtol=1e-5, atol=1e-6)
    changed = tokens.masked_fill(visual >= 0, 60)
    assert torch.equal(model(changed, context), model(tokens, context))


@pytest.mark.parametrize(
    ("visual", "message"),
    [
        ([-1, 0, 1, 2, -1], "3 tokens in whose places.*2 features"),
        ([-1, 0, -1, -1, -1], "1 tokens in whose places.*2 features"),
        ([1, 0, -1, -1, -1], "in the order of tokens"),
        ([0, 0, -1, -1, -1], "in the order of tokens"),
        ([0, 2, -1, -1, -1], "in the order of tokens"),
    ],
)
def test_places_and_features_must_agree(visual, message):
    model = filled(VisionLanguageModel(config(vision())))
    extra = {"patches_NC": torch.zeros(8, 24), "grids": ((1, 2, 4),), "visual_BS": torch.tensor([visual])}
    with pytest.raises(PluginError, match=message):
        model(torch.zeros(1, 5, dtype=torch.int64), Context(5, **extra))


def test_a_part_of_a_row_may_see_a_part_of_the_features():
    check_order(torch.tensor([1, 4]), 6, is_whole=False)
    check_order(torch.tensor([], dtype=torch.int64), 6, is_whole=False)
    with pytest.raises(PluginError, match="6 features"):
        check_order(torch.tensor([1, 6]), 6, is_whole=False)


def test_images_need_a_tower():
    extra = {"patches_NC": torch.zeros(0, 24), "grids": (), "visual_BS": torch.full((1, 5), -1)}
    with pytest.raises(UsageError, match="no vision tower"):
        filled(VisionLanguageModel(config()))(torch.zeros(1, 5, dtype=torch.int64), Context(5, **extra))


def test_shapes_of_places():
    model = filled(VisionLanguageModel(config(vision())))
    extra = {"patches_NC": torch.zeros(0, 24), "grids": (), "visual_BS": torch.full((1, 4), -1)}
    with pytest.raises(PluginError, match=r"visual_BS has shape \[1, 4\]"):
        model(torch.zeros(1, 5, dtype=torch.int64), Context(5, **extra))


# ---------------------------------------------------------------- regions and stages


def test_a_pipeline_keeps_the_first_layers_with_the_tower():
    model = VisionLanguageModel(config(vision(), layers=6))
    regions = model.regions()
    assert regions.blocks == ("visual.blocks.0", "visual.blocks.1", *(f"layers.{i}" for i in range(6)))
    assert regions.stages == tuple(f"layers.{i}" for i in range(2, 6))
    assert regions.compile == tuple(f"layers.{i}" for i in range(6))
    assert model.stage_modules() == (("tok_embeddings", "visual"), ("norm", "head"))
    assert VisionLanguageModel(config(layers=2)).regions().blocks == ("layers.0", "layers.1")


@pytest.mark.parametrize(("share", "first"), [(0.0, 3), (1.0, 1)])
def test_the_tower_counts_where_stages_are_balanced(share, first):
    model = VisionLanguageModel(config(vision(share=share, deepstack=(1,)), layers=6))
    regions, tokens = model.regions(), 64
    costs = Costs.of(model, regions, tokens)
    linear = sum(2 * each.in_features * each.out_features for each in model.visual.blocks[0].modules() if isinstance(each, torch.nn.Linear))
    assert costs.blocks[0] == pytest.approx(4 * share * linear)
    merger, deepstack = (2 * (64 * 64 + 64 * 32) for _ in range(2))
    assert costs.before == pytest.approx(share * (4 * 2 * 24 * 16 + merger + deepstack))
    assert flops(model.visual, tokens) == pytest.approx(costs.before + sum(costs.blocks[:2]))
    (cut,) = balanced(regions, costs, 2)
    assert regions.blocks[cut] == f"layers.{first}"


@pytest.mark.parametrize(
    ("own", "mode", "every", "expected"),
    [
        ("recipe", "none", 1, []),
        ("always", "none", 1, ["visual.blocks.0", "visual.blocks.1"]),
        ("never", "blocks", 1, ["layers.0", "layers.1"]),
        ("recipe", "blocks", 2, ["visual.blocks.0", "layers.0"]),
    ],
)
def test_the_tower_may_be_recomputed_by_a_policy_of_its_own(own, mode, every, expected):
    model = VisionLanguageModel(config(vision(recompute=own), layers=2))
    assert recomputed_blocks(model, RecomputeConfig(mode=mode, every=every)) == expected
    filled(model)
    tokens, visual = torch.randint(60, (1, 6)), torch.tensor([[-1, 0, 1, -1, -1, -1]])
    context = Context(6, patches_NC=torch.randn(8, 24), grids=((1, 2, 4),), visual_BS=visual)
    model(tokens, context).square().sum().backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    prepare_regions(model, CompileConfig(), RecomputeConfig(mode=mode, every=every))
    model(tokens, context).square().sum().backward()
    assert all(torch.equal(model.get_parameter(name).grad, gradient) for name, gradient in before.items())
