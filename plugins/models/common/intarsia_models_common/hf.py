"""What families have in common of Hugging Face: rules of a block, what a `config.json` says of text models, rotary settings in both spellings. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from intarsia.contracts import HFRule
from intarsia.errors import UsageError, did_you_mean

from intarsia_models_common.config import SCALINGS, AttentionConfig, LanguageModelConfig, RopeConfig

SWIGLU = (
    HFRule("gate_proj.weight", "w1.weight"),
    HFRule("up_proj.weight", "w3.weight"),
    HFRule("down_proj.weight", "w2.weight"),
)
QUERIES = HFRule("self_attn.q_proj.weight", "attention.wq.weight")
EXPERTS_APART = (
    HFRule("mlp.experts.{e}.gate_proj.weight", "feed_forward.experts.w1", "stack"),
    HFRule("mlp.experts.{e}.up_proj.weight", "feed_forward.experts.w3", "stack"),
    HFRule("mlp.experts.{e}.down_proj.weight", "feed_forward.experts.w2", "stack"),
)
EXPERTS_STACKED = (
    HFRule("mlp.experts.gate_up_proj", ("feed_forward.experts.w1", "feed_forward.experts.w3"), "split:2@1"),
    HFRule("mlp.experts.down_proj", "feed_forward.experts.w2"),
)
"""The same tensors, gate rows first, as transformers 5 has them in memory and may save them."""

_NAMES = {
    "factor": "factor",
    "original_positions": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_FIELDS = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_positions", "low_frequency_factor", "high_frequency_factor"),
    "yarn": ("factor", "original_positions", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
}
_TYPES = {"original_positions": int, "truncate": bool}


def block_rules(queries: HFRule = QUERIES) -> tuple[HFRule, ...]:
    """A block of attention with head norms, and of a SwiGLU or a router before experts, with names within the block; `queries` where the projection is stored otherwise."""
    return (
        HFRule("input_layernorm.weight", "attention_norm.weight"),
        queries,
        HFRule("self_attn.k_proj.weight", "attention.wk.weight"),
        HFRule("self_attn.v_proj.weight", "attention.wv.weight"),
        HFRule("self_attn.q_norm.weight", "attention.q_norm.weight"),
        HFRule("self_attn.k_norm.weight", "attention.k_norm.weight"),
        HFRule("self_attn.o_proj.weight", "attention.wo.weight"),
        HFRule("post_attention_layernorm.weight", "feed_forward_norm.weight"),
        *placed(SWIGLU, "mlp", "feed_forward"),
        HFRule("mlp.gate.weight", "feed_forward.router.weight"),
    )


def placed(rules: Iterable[HFRule], theirs: str, ours: str) -> tuple[HFRule, ...]:
    """The rules of a part of a model for the part at this place, `theirs` on their side and `ours` on ours."""

    def named(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return f"{ours}.{names}" if isinstance(names, str) else tuple(f"{ours}.{name}" for name in names)

    return tuple(dataclasses.replace(rule, theirs=f"{theirs}.{rule.theirs}", ours=named(rule.ours)) for rule in rules)


def text_to(ours: LanguageModelConfig, attention: AttentionConfig, eps: float) -> dict[str, Any]:
    """What a `config.json` says of a text model whose blocks all have this attention, and norms with this epsilon."""
    return {
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.dim,
        "num_hidden_layers": len(ours.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": ours.max_positions,
        "rms_norm_eps": eps,
        "tie_word_embeddings": ours.tied,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def check_values(theirs: Mapping[str, Any], only: Mapping[str, Any], prefix: str = "") -> None:
    """UsageError, which names key and value, where a config says something else than `only`, of what a family has in one way. An absent key, or null, says nothing."""
    for key, value in only.items():
        found = theirs.get(key)
        if found is not None and found != value:
            raise UsageError(f"config.json says {prefix}{key} = {found!r}, and the model family has only {value!r}.")


def rope_from(theirs: Mapping[str, Any], theta: float = 10000.0, head_dim: int | None = None) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (released files; the kind under `rope_type` or `type`).

    `theta` is what an absent rope_theta means; with `head_dim` a `partial_rotary_factor` becomes `rope.dim`. UsageError for a kind that we do not have, and where both spellings are there and
    say different things.
    """
    settings = _settings_of(theirs)
    kind = settings["rope_type"]
    scaling = "none" if kind == "default" else kind
    if scaling not in SCALINGS:
        raise UsageError(f"config.json asks for rotary scaling {kind!r}. {did_you_mean(kind, SCALINGS)}")
    values: dict[str, Any] = {"theta": float(settings.get("rope_theta") or theirs.get("rope_theta") or theta), "scaling": scaling}
    for field in _FIELDS[scaling]:
        value = settings.get(_NAMES[field])
        if value is not None:
            values[field] = _TYPES.get(field, float)(value)
    if "original_positions" in _FIELDS[scaling] and "original_positions" not in values:
        values["original_positions"] = theirs.get("max_position_embeddings", RopeConfig().original_positions)
    if scaling == "yarn" and settings.get("factor") is None:
        values["factor"] = theirs["max_position_embeddings"] / values["original_positions"]
    partial = settings.get("partial_rotary_factor", theirs.get("partial_rotary_factor"))
    if head_dim is not None and partial is not None and partial != 1.0:
        values["dim"] = int(head_dim * partial)
    sections = settings.get("mrope_section")
    if sections is not None:
        if not settings.get("mrope_interleaved"):
            raise UsageError(
                "config.json has mrope_section without mrope_interleaved: axes of positions whose pairs do not take turns are not supported."
            )
        values["sections"] = tuple(sections)
    return RopeConfig(**values)


def _settings_of(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings as one, the kind under `rope_type`."""
    said: dict[str, dict[str, Any]] = {}
    for spelling in ("rope_scaling", "rope_parameters"):
        found = theirs.get(spelling) or {}
        nested = [key for key, value in found.items() if isinstance(value, Mapping)] if isinstance(found, Mapping) else []
        if nested or not isinstance(found, Mapping):
            raise UsageError(f"config.json says {spelling} = {found!r}: it must be one object of settings, for all layers alike, or null.")
        if found:
            settings = {key: value for key, value in found.items() if key != "type"}
            said[spelling] = settings | {"rope_type": found.get("rope_type") or found.get("type") or "default"}
    scaling, parameters = said.get("rope_scaling", {}), said.get("rope_parameters", {})
    # Programs differ in which of them they read, and none reads both: a run must not depend on that.
    differing = [key for key, value in scaling.items() if parameters and parameters.get(key) != value]
    if differing:
        told = "; ".join(f"{key} is {scaling[key]!r} and {parameters.get(key)!r}" for key in differing)
        raise UsageError(f"config.json has both rope_scaling and rope_parameters, and they differ: {told}. Leave in one of them.")
    return {"rope_type": "default", **scaling, **parameters}


def rope_to(ours: RopeConfig, head_dim: int | None = None) -> dict[str, Any]:
    """`rope_parameters`, which transformers 5 reads, and the two older keys beside it, which earlier ones and other programs read. With `head_dim` a `rope.dim` becomes a
    `partial_rotary_factor`."""
    kind = "default" if ours.scaling == "none" else ours.scaling
    settings: dict[str, Any] = {_NAMES[field]: getattr(ours, field) for field in _FIELDS[ours.scaling] if getattr(ours, field) is not None}
    if ours.sections is not None:
        settings |= {"mrope_section": list(ours.sections), "mrope_interleaved": True}
    partial = {"partial_rotary_factor": ours.dim / head_dim} if head_dim is not None and ours.dim is not None else {}
    return {
        "rope_parameters": {"rope_type": kind, "rope_theta": ours.theta, **settings, **partial},
        "rope_theta": ours.theta,
        "rope_scaling": {"rope_type": kind, **settings} if kind != "default" or settings else None,
        **partial,
    }
