"""DeepSeek-V3's settings and published sizes, and those of models that share its code. Torch-free."""

from __future__ import annotations

import chz
from intarsia_models_common.config import BlockConfig, LanguageModelConfig, MLAConfig, RMSNormConfig, RopeConfig, SwiGLUConfig
from intarsia_models_common.moe.config import GroupLimitedRouterConfig, MoEConfig, RouterConfig, SoftmaxRouterConfig

BIAS_RATE = 1e-3
"""How far the selection bias moves in a step, for most of V3's training; 0 at its end."""

SEQUENCE_LOSS = 1e-4
"""V3's coefficient of the balance loss within a sequence."""


@chz.chz(typecheck=True)
class DeepSeekV3Config(LanguageModelConfig):
    """DeepSeek-V3 (arXiv 2412.19437), V2 (2405.04434), Moonlight (2502.16982)."""

    ahead: tuple[BlockConfig, ...] = chz.field(
        default=(), doc="Blocks of multi-token prediction: the k-th predicts the token k places behind the next one."
    )


def deepseek_v3(
    *,
    dim: int,
    layers: int,
    dense_layers: int,
    attention: MLAConfig,
    dense_hidden: int,
    router: RouterConfig,
    expert_hidden: int,
    shared_experts: int,
    vocab_size: int,
    rope: RopeConfig,
    max_positions: int,
    ahead: int = 0,
    tied: bool = False,
    eps: float = 1e-6,
    initial_std: float = 0.02,
    embedding_std: float = 0.02,
) -> DeepSeekV3Config:
    """A config of `dense_layers` blocks with a dense feed-forward layer, then blocks with experts, `ahead` further of which predict further tokens."""
    norm = RMSNormConfig(eps=eps)
    shared = SwiGLUConfig(hidden=shared_experts * expert_hidden) if shared_experts else None
    experts = MoEConfig(router=router, hidden=expert_hidden, shared=shared)
    dense, sparse = (
        BlockConfig(attention=attention, feed_forward=feed_forward, attention_norm=norm, feed_forward_norm=norm)
        for feed_forward in (SwiGLUConfig(hidden=dense_hidden), experts)
    )
    return DeepSeekV3Config(
        vocab_size=vocab_size,
        dim=dim,
        max_positions=max_positions,
        layers=(dense,) * dense_layers + (sparse,) * (layers - dense_layers),
        ahead=(sparse,) * ahead,
        norm=norm,
        rope=rope,
        tied=tied,
        initial_std=initial_std,
        embedding_std=embedding_std,
    )


def v3_router(
    *, experts: int, top_k: int, groups: int, top_groups: int, scale: float, sequence_loss: float = SEQUENCE_LOSS
) -> GroupLimitedRouterConfig:
    """V3's router: sigmoid scores, the best groups by the sum of their two best biased scores, balanced by the bias."""
    return GroupLimitedRouterConfig(
        experts=experts,
        top_k=top_k,
        groups=groups,
        top_groups=top_groups,
        scale=scale,
        bias_rate=BIAS_RATE,
        sequence_loss=sequence_loss,
    )


def yarn(theta: float, factor: float, original_positions: int, mscale: float) -> RopeConfig:
    """Rotary positions stretched by YaRN as DeepSeek has it: cosine and sine stay as they are, scores are multiplied."""
    return RopeConfig(
        theta=theta,
        interleaved=True,
        scaling="yarn",
        factor=factor,
        original_positions=original_positions,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


def debug() -> DeepSeekV3Config:
    """Every part of V3 in 2 million parameters, for the byte tokenizer's 264 ids: trains on a laptop."""
    return deepseek_v3(
        dim=128,
        layers=4,
        dense_layers=1,
        attention=MLAConfig(heads=4, kv_rank=48, q_rank=64, nope_dim=32, rope_dim=16, value_dim=32),
        dense_hidden=384,
        router=v3_router(experts=8, top_k=2, groups=4, top_groups=2, scale=2.5),
        expert_hidden=128,
        shared_experts=1,
        vocab_size=320,
        rope=RopeConfig(interleaved=True),
        max_positions=4096,
        ahead=1,
        embedding_std=0.5,
    )


def deepseek_v3_671b(ahead: int = 1) -> DeepSeekV3Config:
    """DeepSeek-V3: 671,026,404,352 parameters, and 11,610,067,968 more in its layer that predicts one token further ahead."""
    return deepseek_v3(
        dim=7168,
        layers=61,
        dense_layers=3,
        attention=MLAConfig(heads=128, kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, value_dim=128),
        dense_hidden=18432,
        router=v3_router(experts=256, top_k=8, groups=8, top_groups=4, scale=2.5),
        expert_hidden=2048,
        shared_experts=1,
        vocab_size=129280,
        rope=yarn(10000.0, 40.0, 4096, 1.0),
        max_positions=163840,
        ahead=ahead,
        initial_std=0.006,
        embedding_std=0.006,
    )


def moonlight_16b() -> DeepSeekV3Config:
    """Moonlight-16B-A3B: 15,960,108,544 parameters, 2.9 billion of them for each token."""
    return deepseek_v3(
        dim=2048,
        layers=27,
        dense_layers=1,
        attention=MLAConfig(heads=16, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        dense_hidden=11264,
        router=v3_router(experts=64, top_k=6, groups=1, top_groups=1, scale=2.446),
        expert_hidden=1408,
        shared_experts=2,
        vocab_size=163840,
        rope=RopeConfig(theta=50000.0, interleaved=True),
        max_positions=8192,
        eps=1e-5,
    )


def deepseek_v2_lite() -> DeepSeekV3Config:
    """DeepSeek-V2-Lite: 15,706,484,224 parameters, 2.7 billion of them for each token; its router is a softmax without groups, balanced by a loss."""
    return deepseek_v3(
        dim=2048,
        layers=27,
        dense_layers=1,
        attention=MLAConfig(heads=16, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        dense_hidden=10944,
        router=SoftmaxRouterConfig(experts=64, top_k=6, norm_topk=False, sequence_loss=1e-3),
        expert_hidden=1408,
        shared_experts=2,
        vocab_size=102400,
        rope=yarn(10000.0, 40.0, 4096, 0.707),
        max_positions=163840,
        initial_std=0.006,
        embedding_std=0.006,
    )
