"""Building blocks that families share: norms that store what is added to 1, gates, positions on three axes, prediction further ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

import chz
import pytest
import torch
from intarsia.errors import PluginError, UsageError
from intarsia.plugins import current
from intarsia_deepseek_v3 import config as deepseek
from intarsia_eager.context import TrainContext
from intarsia_models_common.ahead import AheadModel
from intarsia_models_common.attention import sigmoid_gate
from intarsia_models_common.base import LanguageModel
from intarsia_models_common.build import Scope
from intarsia_models_common.config import AttentionConfig, OffsetRMSNormConfig, RopeConfig, SwiGLUConfig
from intarsia_models_common.hf import rope_from, rope_to
from intarsia_models_common.norm import OffsetRMSNorm, offset_rms_norm
from intarsia_models_common.rope import Rope
from intarsia_qwen3.config import qwen3
from intarsia_testing.model import fill

SCOPE = Scope(name="part", dim=64, layer=0, layers=1, rope_interleaved=False, std=0.3, output_std=0.3)


def scope_of(dim: int) -> Scope:
    return dataclasses.replace(SCOPE, dim=dim)


def transformers_module(name: str) -> Any:
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


# ---------------------------------------------------------------- norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_offset_norm_is_transformers_one(dtype):
    """Bit for bit in bfloat16: one cast, behind the factor."""
    theirs = transformers_module("qwen3_5").Qwen3_5RMSNorm(64, 1e-6).to(dtype)
    ours = OffsetRMSNorm(OffsetRMSNormConfig(), SCOPE).to(dtype)
    with torch.no_grad():
        theirs.weight.normal_(std=0.5)
        ours.weight.copy_(theirs.weight)
    x = (3 * torch.randn(5, 7, 64)).to(dtype)
    found, expected = ours(x), theirs(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-6 if dtype == torch.float32 else 0)
    assert ours.inits()["weight"].kind == "zeros"


def test_the_offset_norm_keeps_float64():
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: offset_rms_norm(a, b, 1e-5), (x.requires_grad_(), weight.requires_grad_()))


# ---------------------------------------------------------------- gate


def test_a_gate_multiplies_what_heads_give():
    config = AttentionConfig(heads=4, kv_heads=2, head_dim=16, gate=True)
    gated = current().build(config, SCOPE)
    with torch.no_grad():
        for parameter in gated.parameters():
            parameter.normal_(std=0.3)
    plain = current().build(chz.replace(config, gate=False), SCOPE)
    plain.load_state_dict({name: tensor for name, tensor in gated.state_dict().items() if not name.startswith("wg")})
    x, rope = torch.randn(2, 5, 64), Rope(RopeConfig(), scope_of(16))(torch.arange(5).expand(2, 5))
    context = TrainContext(torch.arange(5).expand(2, 5), None, ((5,), (5,)))
    heads: list[torch.Tensor] = []
    plain.wo.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0]))
    plain(x, rope, context)
    torch.testing.assert_close(gated(x, rope, context), gated.wo(heads[0] * torch.sigmoid(gated.wg(x))))
    assert gated.wg.weight.shape == gated.wq.weight.shape and sigmoid_gate.reference(torch.tensor(2.0), torch.tensor(0.0)) == 1.0


# ---------------------------------------------------------------- positions on three axes


@pytest.mark.parametrize(("head_dim", "rotated", "sections"), [(128, 128, (24, 20, 20)), (256, 64, (11, 11, 10)), (16, 8, (2, 1, 1))])
def test_axes_take_turns_as_in_transformers(head_dim, rotated, sections):
    module = transformers_module("qwen3_5")
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": rotated / head_dim, "mrope_section": list(sections)}
    config = module.Qwen3_5TextConfig(head_dim=head_dim, rope_parameters=rope | {"mrope_interleaved": True})
    theirs = module.Qwen3_5TextRotaryEmbedding(config)
    ours = Rope(RopeConfig(theta=1e7, dim=rotated, sections=sections), scope_of(head_dim))
    positions_3BS = torch.randint(0, 5000, (3, 2, 9))
    cos, sin = theirs(torch.zeros(1), positions_3BS)
    for found, expected in zip(ours(positions_3BS), (cos, sin), strict=True):
        assert torch.equal(torch.cat((found, found), -1), expected)
    # By the rule itself: pair i turns by height where i % 3 is 1 and i < 3 h, by width where i % 3 is 2 and i < 3 w, else by time.
    axes = [1 if i % 3 == 1 and i < 3 * sections[1] else 2 if i % 3 == 2 and i < 3 * sections[2] else 0 for i in range(rotated // 2)]
    assert tuple(axes.count(axis) for axis in range(3)) == sections
    angles = torch.stack([positions_3BS[axis].float() * ours.frequencies_d[i] for i, axis in enumerate(axes)], -1)
    assert torch.equal(ours(positions_3BS)[0], angles.cos())


def test_equal_axes_are_plain_positions():
    plain, axes = (Rope(RopeConfig(theta=5e6, sections=s), scope_of(16)) for s in (None, (4, 2, 2)))
    positions_BS = torch.arange(12).view(2, 6)
    for given in (positions_BS, positions_BS.expand(3, 2, 6)):
        assert all(torch.equal(one, other) for one, other in zip(axes(given), plain(positions_BS), strict=True))
    with pytest.raises(PluginError, match="no sections"):
        plain(positions_BS.expand(3, 2, 6))


def test_a_model_takes_its_positions_from_what_the_loader_adds():
    config = qwen3(dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, feed_forward=SwiGLUConfig(hidden=8), vocab_size=32)
    model = fill(current().build(chz.replace(config, rope=RopeConfig(sections=(4, 2, 2)))))
    tokens, positions_BS = torch.randint(0, 32, (1, 6)), torch.arange(6)[None]
    positions_3BS = torch.stack((positions_BS, positions_BS // 2, positions_BS % 2))

    def hidden(**extra: Any) -> torch.Tensor:
        return model(tokens, TrainContext(positions_BS, None, ((6,),), extra=extra))

    assert torch.equal(hidden(), hidden(positions_3BS=positions_BS.expand(3, 1, 6)))
    assert not torch.allclose(hidden(), hidden(positions_3BS=positions_3BS))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RopeConfig(sections=(1, 5, 0)), "do not give height and width so many"),
        (lambda: RopeConfig(sections=(1, 1, 4)), "do not give height and width so many"),
        (lambda: RopeConfig(sections=(4, 2, -1)), "sections"),
        (lambda: RopeConfig(dim=32, sections=(4, 2, 2)), "rope.dim = 32 has 16"),
        (lambda: Rope(RopeConfig(sections=(4, 2, 2)), scope_of(32)), "a head has 16"),
        (
            lambda: rope_from({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}}),
            "mrope_interleaved",
        ),
    ],
)
def test_bad_sections_are_told(make, text):
    with pytest.raises(UsageError, match=text):
        make()


def test_sections_and_partial_rotations_in_their_configs():
    ours = RopeConfig(theta=1e7, dim=64, sections=(11, 11, 10))
    theirs = rope_to(ours, 256)
    assert theirs["rope_parameters"]["partial_rotary_factor"] == 0.25 and theirs["rope_scaling"]["mrope_section"] == [11, 11, 10]
    assert rope_from(theirs, head_dim=256) == ours
    released = {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "rope_scaling": {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    }
    assert rope_from(released, head_dim=256) == ours


# ---------------------------------------------------------------- further ahead


class FromHidden(AheadModel):
    ahead_is_normed = True


@pytest.mark.parametrize("kind", [AheadModel, FromHidden])
def test_a_depth_is_given_the_residual_stream_or_what_the_norm_made_of_it(kind):
    config = chz.replace(deepseek.debug(), layers=deepseek.debug().layers[:2], ahead=deepseek.debug().ahead * 2)
    model = fill(kind(config)).eval()
    tokens, positions = torch.randint(0, 300, (1, 7)), torch.arange(7)[None]
    following = torch.randint(0, 300, (1, 7, 2))
    seen: list[torch.Tensor] = []
    for depth in model.mtp:
        depth.hidden_norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    streams: list[torch.Tensor] = []
    for part in (model.layers[-1], model.mtp[0].block):
        part.register_forward_hook(lambda module, inputs, output: streams.append(output))
    results = model(tokens, TrainContext(positions, None, ((7,),), following_BSK=following))
    assert len(results) == 3
    expected = results[:2] if kind.ahead_is_normed else streams[:2]
    assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True))
    assert torch.equal(model(tokens, TrainContext(positions, None, ((7,),))), results[0])


def test_prediction_ahead_goes_before_another_base():
    class Other(LanguageModel):
        def stage_modules(self):
            return ("tok_embeddings", "eyes"), ("norm", "head")

        def leave(self, carry, shared, context):
            return super().leave(carry, shared, context) * 2

    class Both(AheadModel, Other):
        pass

    with torch.device("meta"):
        model = Both(deepseek.debug())
    assert model.stage_modules() == (("tok_embeddings", "eyes"), ("norm", "head", "following_embeddings"))
    assert model.regions().blocks[-1] == "mtp.0" and model.regions().stages == tuple(f"layers.{i}" for i in range(4))


@pytest.mark.parametrize(
    ("theirs", "texts"),
    [
        # transformers 5 reads rope_scaling alone where both are there, others the other one.
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            ("rope_scaling", "rope_parameters", "yarn", "default"),
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            ("factor", "4.0", "2.0"),
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, ("rope_parameters", "full_attention")),
        ({"rope_scaling": "yarn"}, ("rope_scaling", "'yarn'")),
    ],
)
def test_rotary_settings_that_contradict_each_other_or_have_another_form_are_refused(theirs, texts):
    with pytest.raises(UsageError) as error:
        rope_from(theirs)
    assert all(text in str(error.value) for text in texts), str(error.value)


@pytest.mark.parametrize("scaling", ["none", "linear", "yarn"])
def test_both_spellings_that_agree_are_read(scaling):
    ours = RopeConfig(theta=1e6, scaling=scaling, factor=1.0 if scaling == "none" else 4.0)
    theirs = rope_to(ours)
    assert rope_from(theirs) == ours
    if theirs["rope_scaling"]:
        theirs["rope_scaling"]["type"] = theirs["rope_scaling"].pop("rope_type")
        assert rope_from(theirs) == ours


def test_rotations_wider_than_a_head_and_models_without_layers_are_refused():
    model = qwen3(dim=32, layers=1, heads=4, kv_heads=2, head_dim=16, feed_forward=SwiGLUConfig(hidden=8), vocab_size=16)
    with pytest.raises(UsageError, match=r"rope\.dim = 24.*heads of 16"):
        current().build(chz.replace(model, rope=chz.replace(model.rope, dim=24)))
    with pytest.raises(UsageError, match=r"model\.layers"):
        chz.replace(model, layers=())
