"""DeepSeek-V3's sizes, configs and their way to Hugging Face and back, its sharding table and its depths of prediction; no released weights."""

from __future__ import annotations

import re
from typing import Any

import chz
import pytest
import torch
from intarsia.contracts import IGNORE, Batch
from intarsia.errors import UsageError
from intarsia.plugins import current, import_reference
from intarsia_deepseek_v3 import config as sizes
from intarsia_deepseek_v3 import sharding
from intarsia_deepseek_v3.config import DeepSeekV3Config, deepseek_v3, v3_router
from intarsia_deepseek_v3.hf import config_to_ours, config_to_theirs
from intarsia_eager.config import CrossEntropyConfig
from intarsia_eager.context import TrainContext
from intarsia_eager.cross_entropy import CrossEntropy
from intarsia_eager.following import with_following
from intarsia_models_common.config import AttentionConfig, MLAConfig, RMSNormConfig, RopeConfig, SwiGLUConfig
from intarsia_models_common.moe.config import SigmoidRouterConfig
from intarsia_testing.model import documents_of, fill, outputs, positions_of, predictions

PUBLISHED = {"deepseek_v3_671b": 671_026_404_352, "moonlight_16b": 15_960_108_544, "deepseek_v2_lite": 15_706_484_224}
DEPTH = 11_610_067_968
"""Parameters of V3's depth of prediction beside the shared embedding and head: a block with experts, three norms, a projection of 2 D x D."""


def meta(config: DeepSeekV3Config) -> Any:
    with torch.device("meta"):
        return current().build(config)


def tiny(ahead: int = 1, **changes: Any) -> DeepSeekV3Config:
    settings = {
        "dim": 32,
        "layers": 2,
        "dense_layers": 1,
        "attention": MLAConfig(heads=2, kv_rank=16, q_rank=12, nope_dim=8, rope_dim=4, value_dim=6),
        "dense_hidden": 48,
        "router": v3_router(experts=8, top_k=3, groups=4, top_groups=2, scale=2.5),
        "expert_hidden": 16,
        "shared_experts": 1,
        "vocab_size": 96,
        "rope": RopeConfig(interleaved=True),
        "max_positions": 128,
        "ahead": ahead,
    }
    return deepseek_v3(**{**settings, **changes})


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    model = meta(getattr(sizes, name)())
    count = sum(parameter.numel() for parameter in model.parameters())
    depths = sum(parameter.numel() for name, parameter in model.named_parameters() if name.startswith("mtp."))
    assert count - depths == PUBLISHED[name]
    assert depths == (DEPTH if name == "deepseek_v3_671b" else 0)


def test_flops_are_the_sheets_formula():
    model = meta(sizes.deepseek_v3_671b(ahead=0))
    routed = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts.w" in name)
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    assert routed == 653_908_770_816
    active = PUBLISHED["deepseek_v3_671b"] - routed + routed * 8 // 256
    assert active == 37_552_282_624
    tokens = 4096
    attention = 61 * 3 * 2 * 128 * (192 + 128) * (tokens + 1) / 2  # the average of 1 .. S entries seen
    assert model.flops_per_token(tokens) == pytest.approx(6 * (active - 129280 * 7168 - norms) + attention, rel=1e-12)
    deeper = meta(sizes.deepseek_v3_671b()).flops_per_token(tokens) - model.flops_per_token(tokens)
    block = (DEPTH - 256 * 3 * 7168 * 2048 + 8 * 3 * 7168 * 2048) - 5 * 7168 - 1536 - 512
    assert deeper == pytest.approx(6 * (block + 129280 * 7168) + attention / 61, rel=1e-12)


@pytest.mark.parametrize("name", ["debug", *PUBLISHED])
def test_the_table_of_roles_fits_the_model(name):
    config = getattr(sizes, name)()
    model = meta(config)
    rows = sharding.table(config)
    modules = [found for found, _ in model.named_modules()]

    def matched(pattern: str) -> list[str]:
        form = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        return [found for found in modules if form.fullmatch(found)]

    places = {pattern: matched(pattern) for pattern, _, _ in rows}
    assert all(places.values()), [pattern for pattern, found in places.items() if not found]
    covered = {found for each in places.values() for found in each}
    bare = [found for found, module in model.named_modules() if list(module.parameters(recurse=False)) and found not in covered]
    assert not bare
    experts = [found for pattern, role, _ in rows if role == "expert" for found in places[pattern]]
    assert len(experts) == sum(".experts" in found and found.endswith("experts") for found in modules)


def test_regions_cut_pipelines_between_blocks_only():
    regions = meta(tiny(ahead=2)).regions()
    assert regions.blocks == ("layers.0", "layers.1", "mtp.0", "mtp.1") and regions.stages == ("layers.0", "layers.1")
    assert regions.ties == (("tok_embeddings.weight", "following_embeddings.weight"),)
    tied = meta(tiny(tied=True)).regions()
    assert tied.ties == (("tok_embeddings.weight", "head.weight", "following_embeddings.weight"),)
    assert meta(tiny(ahead=0)).regions().ties == ()


def test_the_whole_of_the_recipes_builds():
    found = [entry for entry in current().registry("recipe").entries() if entry.owner == "intarsia-deepseek-v3"]
    assert len(found) == 4
    for entry in found:
        recipe = current().target(entry)()
        assert recipe.train.sequence_length <= recipe.model.max_positions, entry.name


# ---------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("name", ["debug", *PUBLISHED])
def test_config_goes_to_hugging_face_and_back(name):
    config = getattr(sizes, name)()
    plain = {"initial_std": 0.02, "embedding_std": 0.02}
    theirs = config_to_theirs(config)
    assert config_to_ours(theirs) == chz.replace(config, **plain)
    assert theirs["architectures"] == ["DeepseekV2ForCausalLM" if name == "deepseek_v2_lite" else "DeepseekV3ForCausalLM"]


def test_the_released_config_is_read():
    released = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    assert config_to_ours(released) == chz.replace(sizes.deepseek_v3_671b(), initial_std=0.02, embedding_std=0.02)
    assert meta(sizes.deepseek_v3_671b()).layers[0].attention.scale == pytest.approx(0.1352338, abs=1e-7)


@pytest.mark.parametrize(
    "key,value",
    [
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("moe_layer_freq", 2),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("num_key_value_heads", 1),
        ("attention_dropout", 0.1),
    ],
)
def test_import_refuses_what_is_not_had_by_name(key, value):
    with pytest.raises(UsageError, match=rf"{key} = {value!r}"):
        config_to_ours({**config_to_theirs(tiny()), key: value})


def test_import_of_v2_refuses_by_name():
    theirs = config_to_theirs(sizes.deepseek_v2_lite())
    with pytest.raises(UsageError, match="topk_method = 'gready'"):
        config_to_ours({**theirs, "topk_method": "gready"})
    with pytest.raises(UsageError, match="norm_topk_prob"):
        config_to_ours({**theirs, "norm_topk_prob": True})


def test_export_refuses_what_their_classes_lack():
    plain = tiny()
    sparse = plain.layers[1]
    other = chz.replace(sparse, attention=MLAConfig(heads=1, kv_rank=16, q_rank=12, nope_dim=8, rope_dim=4, value_dim=6))
    softmax = AttentionConfig(heads=2, kv_heads=1, head_dim=16)
    router = SigmoidRouterConfig(experts=8, top_k=2)
    cases = {
        "differ": chz.replace(plain, layers=(plain.layers[0], sparse, other)),
        "dense blocks first": chz.replace(plain, layers=(sparse, plain.layers[0]), ahead=()),
        "at least one with experts": chz.replace(plain, layers=plain.layers[:1], ahead=()),
        "replaced": chz.replace(plain, layers=tuple(chz.replace(block, attention=softmax) for block in plain.layers), ahead=()),
        "one epsilon": chz.replace(plain, norm=RMSNormConfig(eps=1e-3)),
        "epsilon of 1e-06": tiny(
            attention=MLAConfig(heads=2, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6, norm=RMSNormConfig(eps=1e-5))
        ),
        "scale of their own": tiny(attention=MLAConfig(heads=2, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6, scale=0.5)),
        "V3's router": tiny(router=router),
        "no multiple": chz.replace(
            plain,
            ahead=(),
            layers=(chz.replace(sparse, feed_forward=chz.replace(sparse.feed_forward, shared=SwiGLUConfig(hidden=17))),),
        ),
        r"rope\.dim": chz.replace(plain, rope=RopeConfig(interleaved=True, dim=2)),
    }
    for words, config in cases.items():
        with pytest.raises(UsageError, match=words):
            config_to_theirs(config)


# ---------------------------------------------------------------- multi-token prediction


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


@pytest.mark.parity
def test_depths_equal_a_hand_built_reference():
    """The depths as the paper has them, around transformers' decoder layers: the k-th layer behind the last gets the embedding of the token k places on, and the
    residual stream before it."""
    transformers = pytest.importorskip("transformers")
    depths, tokens = 2, 20
    config = tiny(ahead=depths)
    ours = fill(current().build(config), 0, 0.05).eval()
    theirs = config_to_theirs(config)
    settings = {key: value for key, value in theirs.items() if key not in ("architectures", "model_type", "rope_theta", "rope_scaling")}
    made = transformers.DeepseekV3Config(
        **{**settings, "num_hidden_layers": 2 + depths, "num_nextn_predict_layers": 0, "attn_implementation": "eager"}
    )
    reference = transformers.DeepseekV3ForCausalLM(made).float().eval()
    table = import_reference(current().registry("model").find("deepseek_v3").hf)
    from intarsia_huggingface.rules import apply_rules

    values = {**dict(ours.named_parameters()), **{name: buffer for name, buffer in ours.named_buffers() if name.endswith("router.bias")}}
    numbers = {key: value for key, value in theirs.items() if type(value) is int}
    names = {name for name, _ in ours.named_parameters(remove_duplicate=False)} | set(values)
    aliases = {"following_embeddings.weight": "tok_embeddings.weight"}
    exported = apply_rules(table, values, 4, "export", sizes=numbers, experts=8, names=names, aliases=aliases)
    state = {}
    for name, tensor in exported.items():
        found = re.fullmatch(r"(.*experts)\.0\.(gate|down)_proj\.weight", name)
        if found and found[2] == "gate":
            pairs = [torch.cat([exported[f"{found[1]}.{e}.{kind}_proj.weight"] for kind in ("gate", "up")]) for e in range(8)]
            state[f"{found[1]}.gate_up_proj"] = torch.stack(pairs)
        elif found:
            state[f"{found[1]}.down_proj"] = torch.stack([exported[f"{found[1]}.{e}.down_proj.weight"] for e in range(8)])
        elif not re.search(r"experts\.\d+\.", name):
            state[name] = tensor
    missing, extra = reference.load_state_dict(state, strict=False)
    assert not missing and {name.split(".", 3)[3] for name in extra} == {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "embed_tokens.weight",
        "shared_head.norm.weight",
        "shared_head.head.weight",
    }
    ids_BS = torch.randint(0, 96, (1, tokens), generator=torch.Generator().manual_seed(3))
    body = reference.model
    with torch.no_grad():
        hidden = predictions(ours, ids_BS, ((tokens,),))
        positions = torch.arange(tokens)[None]
        rope, mask = body.rotary_emb(body.embed_tokens(ids_BS), positions), torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
        x_BSD = body.embed_tokens(ids_BS)
        for layer in body.layers[:2]:
            x_BSD = layer(x_BSD, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        logits = [reference.lm_head(body.norm(x_BSD))]
        for k in range(1, depths + 1):
            at = f"model.layers.{1 + k}"
            next_BS = torch.cat((ids_BS[:, k:], torch.zeros(1, k, dtype=torch.int64)), 1)
            parts = (rms(body.embed_tokens(next_BS), exported[f"{at}.enorm.weight"]), rms(x_BSD, exported[f"{at}.hnorm.weight"]))
            u_BSD = torch.cat(parts, -1) @ exported[f"{at}.eh_proj.weight"].T
            x_BSD = body.layers[1 + k](u_BSD, attention_mask=mask, position_ids=positions, position_embeddings=rope)
            logits.append(reference.lm_head(rms(x_BSD, exported[f"{at}.shared_head.norm.weight"])))
        assert len(hidden) == len(logits) == depths + 1
        for k, (one, other) in enumerate(zip(hidden, logits, strict=True)):
            assert (ours.project(one) - other)[:, : tokens - k].abs().max() <= 1e-5, k


def test_the_loss_is_the_next_tokens_and_the_mean_of_the_depths():
    model = fill(current().build(tiny(ahead=2)), 0, 0.05)
    lengths = ((7, 1, 4), (12,))
    tokens_BS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    documents_BS = documents_of(lengths)
    labels_BS = torch.where(documents_BS[:, 1:] == documents_BS[:, :-1], tokens_BS[:, 1:], IGNORE)
    labels_BS = torch.cat((labels_BS, torch.full((2, 1), IGNORE)), 1)
    batch = with_following(Batch(tokens_BS, labels_BS, positions_of(documents_BS), documents_BS, lengths), model.predicts_ahead)
    hidden = model(tokens_BS, TrainContext.of(batch))
    loss = CrossEntropy(CrossEntropyConfig(ahead_weight=0.3))(model, hidden, batch)
    expected = []
    for k in range(3):
        total = torch.zeros(())
        for b, row in enumerate(lengths):
            start = 0
            for length in row:
                for i in range(length - 1 - k):
                    log_probs_V = model.project(hidden[k][b, start + i]).log_softmax(-1)
                    total = total - log_probs_V[tokens_BS[b, start + i + 1 + k]]
                start += length
        expected.append(total)
    assert torch.allclose(loss.total, expected[0] + 0.3 / 2 * (expected[1] + expected[2]), rtol=1e-5)
    assert torch.allclose(loss.sums["ahead_2"], expected[2].detach(), rtol=1e-5)


def test_without_following_tokens_there_is_one_prediction():
    model = fill(current().build(tiny()), 0, 0.05)
    tokens_BS = torch.randint(0, 96, (1, 8))
    context = TrainContext(torch.arange(8)[None], None, ((8,),))
    hidden_BSD = model(tokens_BS, context)
    assert isinstance(hidden_BSD, torch.Tensor) and torch.equal(hidden_BSD, predictions(model, tokens_BS, ((8,),))[0])


def test_packed_equals_separate_and_recomputed_equals_kept():
    from intarsia.config import CompileConfig, RecomputeConfig
    from intarsia_eager.engine import prepare_regions

    lengths = ((5, 1, 10),)
    tokens_BS = torch.randint(0, 96, (1, 16), generator=torch.Generator().manual_seed(0))
    model = fill(current().build(tiny(ahead=2)), 0, 0.05)
    packed = outputs(model, tokens_BS, lengths)
    parts = [outputs(model, tokens_BS[:, a:b], ((b - a,),)) for a, b in ((0, 5), (5, 6), (6, 16))]
    assert torch.allclose(packed, torch.cat(parts, 1), atol=1e-5)
    used = [parameter for name, parameter in model.named_parameters() if name != "head.weight"]
    gradients = torch.autograd.grad(packed.square().sum(), used)
    prepare_regions(model, CompileConfig(), RecomputeConfig(mode="blocks"))
    again = torch.autograd.grad(outputs(model, tokens_BS, lengths).square().sum(), used)
    assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))
