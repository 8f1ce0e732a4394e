"""Hugging Face folders of Qwen3-VL and Qwen3.5, both ways: transformers' own saves, the layouts of released folders, float8, and folders that do not fit."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chz
import pytest
import torch
from intarsia.checkpoint import open_weights
from intarsia.cli import main
from intarsia.contracts import Box
from intarsia.errors import CheckpointError, UsageError
from intarsia.plugins import current, import_reference
from intarsia_eager.context import TrainContext
from intarsia_generation import load
from intarsia_huggingface.rules import apply_rules, choose, expand, whole_numbers
from intarsia_models_common.config import AttentionConfig, OffsetRMSNormConfig, RopeConfig, SwiGLUConfig
from intarsia_models_common.linear_attention.config import GatedDeltaNetConfig
from intarsia_models_common.moe.config import softmax_experts
from intarsia_models_common.vision.config import VisionConfig
from intarsia_qwen3_5 import config as qwen3_5
from intarsia_qwen3_vl import config as qwen3_vl
from intarsia_testing.model import fill
from intarsia_testing.parity_samples import BATCHES, make_samples, text_samples
from safetensors import safe_open
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

RECIPE = f"{Path(__file__).parents[1] / 'e2e' / 'train_recipes.py'}:tiny"
IDS = {"image_id": 250, "video_id": 251, "vision_start_id": 252, "vision_end_id": 253}
VALUES = 3 * 2 * 4 * 4


def tower(deepstack: tuple[int, ...] = ()) -> VisionConfig:
    return VisionConfig(depth=3, dim=32, hidden=48, heads=2, out_dim=64, patch=4, table=4, deepstack=deepstack)


def seeing(moe: bool) -> Any:
    feed_forward = softmax_experts(4, 2, 24) if moe else SwiGLUConfig(hidden=96)
    rope = RopeConfig(theta=5e6, sections=(4, 2, 2))
    settings: dict[str, Any] = {"dim": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab_size": 264, "max_positions": 256}
    return qwen3_vl.qwen3_vl(**settings, **IDS, feed_forward=feed_forward, vision=tower((0, 2)), rope=rope, tied=not moe)


def hybrid(moe: bool, ahead: int = 0, sees: bool = True) -> Any:
    full = AttentionConfig(heads=4, kv_heads=2, head_dim=32, qk_norm=OffsetRMSNormConfig(eps=1e-6), gate=True)
    linear = GatedDeltaNetConfig(key_heads=2, value_heads=4, key_dim=16, value_dim=8)
    return qwen3_5.qwen3_5(
        dim=64,
        mixers=qwen3_5.in_turns(linear, full, 4),
        feed_forward=qwen3_5.experts(4, 2, 32, 48) if moe else SwiGLUConfig(hidden=96),
        vision=tower() if sees else None,
        ahead_mixer=full,
        ahead=ahead,
        vocab_size=264,
        rope=RopeConfig(theta=1e7, dim=8, sections=(2, 1, 1)),
        max_positions=256,
        **IDS,
    )


MODELS = {
    "qwen3_vl": lambda: seeing(False),
    "qwen3_vl_moe": lambda: seeing(True),
    "qwen3_5": lambda: hybrid(False),
    "qwen3_5_moe": lambda: hybrid(True),
    "qwen3_5_text": lambda: hybrid(False, sees=False),
    "qwen3_5_moe_text": lambda: hybrid(True, sees=False),
}


def table_of(config: Any) -> Any:
    return import_reference(current().entry_of(config).hf)


def theirs_of(config: Any) -> dict[str, Any]:
    return import_reference(table_of(config).config_to_theirs)(config)


def release(folder: Path, config: Any, apart: bool = False) -> dict[str, torch.Tensor]:
    """A folder as released, by the table's export; `apart`: the experts one by one. Returns our tensors."""
    model = fill(current().build(config), 0, 0.05)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    theirs, table = theirs_of(config), table_of(config)
    sizes = whole_numbers(theirs)
    aliases = {other: group[0] for group in model.regions().ties for other in group[1:]}
    if apart:
        table = with_experts_apart(table)
    tensors = apply_rules(
        table,
        values,
        len(model.regions().blocks),
        "export",
        sizes=sizes,
        experts=sizes.get("text_config.num_experts", sizes.get("num_experts", 0)),
        names=set(values),
        aliases=aliases,
    )
    folder.mkdir()
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(theirs))
    return values


def with_experts_apart(table: Any) -> Any:
    """The table without the rules for stacked experts, so that the ones for single experts are taken."""
    return dataclasses.replace(
        table, rules=tuple(rule for rule in table.rules if ".experts.gate_up" not in rule.theirs and ".experts.down" not in rule.theirs)
    )


def class_of(config: Any) -> Any:
    return getattr(transformers, theirs_of(config)["architectures"][0])


def reference(config: Any, folder: Path) -> Any:
    model, notes = class_of(config).from_pretrained(folder, attn_implementation="eager", output_loading_info=True, dtype="auto")
    assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), notes
    return model.eval()


def samples_of(config: Any) -> Any:
    """Rows that mix media and text, or of text alone where the model does not see."""
    return text_samples(250, 84) if config.vision is None else make_samples(BATCHES["mixed"], VALUES)


def their_logits(model: Any, config: Any) -> torch.Tensor:
    samples = samples_of(config)
    with torch.no_grad():
        return model(input_ids=samples.tokens_BS, **samples.theirs).logits


def our_logits(path: Path) -> torch.Tensor:
    model = load(path, tokenizer="byte", device="cpu").model
    samples = samples_of(model.config)
    rows, length = samples.tokens_BS.shape
    context = TrainContext(torch.arange(length).expand(rows, length), None, ((length,),) * rows, extra=samples.extra)
    with torch.no_grad():
        return model.project(model(samples.tokens_BS, context))


@pytest.mark.parity
@pytest.mark.parametrize("name", MODELS)
def test_folders_go_round(name, tmp_path):
    """A released layout is loaded by transformers strictly; its own save is read by us, imported into a run, and exported: the same logits at every stop."""
    config = MODELS[name]()
    values = release(tmp_path / "hub", config)
    model = reference(config, tmp_path / "hub")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    for folder in ("hub", "theirs"):
        weights = open_weights(tmp_path / folder)
        assert set(weights.shapes()) == set(values) and all(torch.equal(weights.read(each), value) for each, value in values.items())
    expected = their_logits(model, config)
    run = tmp_path / "run"
    assert main(["checkpoint", "import", str(tmp_path / "theirs"), str(run), "--from", "hf", "--option", f"recipe={RECIPE}"]) == 0
    logits = our_logits(run)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert main(["checkpoint", "export", str(run), str(tmp_path / "out"), "--to", "hf"]) == 0
    one, other = load_file(tmp_path / "hub" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(one) == set(other) and all(torch.equal(one[each], other[each]) for each in one)
    assert torch.equal(their_logits(reference(config, tmp_path / "out"), config), expected)


def test_released_layouts_are_those_of_the_sheets(tmp_path):
    release(tmp_path / "vl", seeing(True))
    release(tmp_path / "hybrid", hybrid(True, ahead=1))
    vl, hybrid_files = (load_file(tmp_path / folder / "model.safetensors") for folder in ("vl", "hybrid"))
    at = "model.language_model.layers.0"
    assert vl[f"{at}.mlp.experts.gate_up_proj"].shape == (4, 64, 48) and vl[f"{at}.mlp.experts.down_proj"].shape == (4, 24, 64)
    assert vl["model.visual.patch_embed.proj.weight"].shape == (32, 3, 2, 4, 4)
    assert hybrid_files[f"{at}.mlp.experts.gate_up_proj"].shape == (4, 64, 64) and hybrid_files[f"{at}.mlp.experts.down_proj"].shape == (
        4,
        64,
        32,
    )
    assert hybrid_files[f"{at}.linear_attn.conv1d.weight"].shape == (2 * 32 + 32, 1, 4)
    assert hybrid_files["model.language_model.layers.3.self_attn.q_proj.weight"].shape == (2 * 4 * 32, 64)
    depth = {name.removeprefix("mtp.layers.0.") for name in hybrid_files if name.startswith("mtp.layers.0.")}
    assert {"mlp.experts.3.up_proj.weight", "mlp.shared_expert_gate.weight", "self_attn.q_proj.weight"} <= depth
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"} <= set(hybrid_files)


def test_a_query_head_and_its_gate_are_stored_together(tmp_path):
    values = release(tmp_path / "hub", hybrid(False))
    both = load_file(tmp_path / "hub" / "model.safetensors")["model.language_model.layers.3.self_attn.q_proj.weight"]
    for head in range(4):
        for part, name in enumerate(("wq", "wg")):
            ours = values[f"layers.3.attention.{name}.weight"][32 * head : 32 * (head + 1)]
            assert torch.equal(both[64 * head + 32 * part : 64 * head + 32 * (part + 1)], ours)


def test_experts_may_be_stacked_or_apart(tmp_path):
    stacked = release(tmp_path / "stacked", hybrid(True, ahead=1))
    apart = release(tmp_path / "apart", hybrid(True, ahead=1), apart=True)
    names = set(load_file(tmp_path / "apart" / "model.safetensors"))
    assert "model.language_model.layers.0.mlp.experts.3.gate_proj.weight" in names
    for folder, values in (("stacked", stacked), ("apart", apart)):
        weights = open_weights(tmp_path / folder)
        assert all(torch.equal(weights.read(name), value) for name, value in values.items())
        name = "layers.1.feed_forward.experts.w3"
        box = Box((1, 3, 5), (2, 7, 30))
        assert torch.equal(weights.read(name, box), values[name][1:3, 3:10, 5:35])


def test_a_depth_that_config_json_promises_must_be_there(tmp_path):
    """transformers saves no layers of multi-token prediction, and keeps what config.json says of them."""
    release(tmp_path / "hub", hybrid(False, ahead=1))
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}, tmp_path / "hub" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight.*\n.*transformers does not save it: set mtp_num_hidden_layers to 0"):
        open_weights(tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 0
    path.write_text(json.dumps(config))
    open_weights(tmp_path / "hub")


def test_decays_keep_float32(tmp_path):
    config = hybrid(False)
    release(tmp_path / "hub", config)
    assert main(["checkpoint", "import", str(tmp_path / "hub"), str(tmp_path / "run"), "--from", "hf", "--option", f"recipe={RECIPE}"]) == 0
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hf", "--option", "dtype=bfloat16"]) == 0
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        dtypes = {key: file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118 - not a mapping
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {f"model.language_model.layers.{i}.linear_attn.{name}" for i in range(3) for name in ("A_log", "dt_bias")}
    mixer = load(tmp_path / "hub", tokenizer="byte", device="cpu", dtype="bfloat16").model.layers[0].attention
    assert mixer.log_a.dtype == mixer.dt_bias.dtype == torch.float32 and mixer.wq.weight.dtype == torch.bfloat16


# ---------------------------------------------------------------- float8


def quantised(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Payload, scales, and what they stand for, of a matrix or a stack of them: by loops over blocks, edges partial."""
    if weight.dim() > 2:
        return tuple(torch.stack(parts) for parts in zip(*(quantised(each, rows, columns) for each in weight), strict=True))  # type: ignore[return-value]
    payload, exact = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[where].abs().max() / 448
            payload[where] = (weight[where] / scales[i, j]).to(torch.float8_e4m3fn)
            exact[where] = payload[where].float() * scales[i, j]
    return payload, scales, exact


@pytest.mark.parametrize("name,apart", [("qwen3_vl_moe", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True), ("qwen3_5", False)])
def test_float8_releases_are_dequantised(name, apart, tmp_path):
    """The text model's projections in blocks, stacks of experts among them; the tower, norms, routers, embeddings and small projections as they are."""
    config = MODELS[name]()
    release(tmp_path / "plain", config, apart)
    release(tmp_path / "fp8", config, apart)
    stored, exact = {}, {}
    for key, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        stored[key] = exact[key] = tensor
        if "_proj" in key and "visual" not in key and "in_proj_a" not in key and "in_proj_b" not in key:
            stored[key], stored[f"{key}_scale_inv"], exact[key] = quantised(tensor, 24, 20)
    save_file(stored, tmp_path / "fp8" / "model.safetensors")
    save_file(exact, tmp_path / "plain" / "model.safetensors")
    path = tmp_path / "fp8" / "config.json"
    settings = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [24, 20]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    one, other = open_weights(tmp_path / "fp8"), open_weights(tmp_path / "plain")
    for each, shape in one.shapes().items():
        assert torch.equal(one.read(each), other.read(each)), each
        if ".experts." in each or each.endswith("attention.wg.weight"):
            box = Box(tuple(size // 3 for size in shape), tuple(size - size // 3 - 1 for size in shape))
            assert torch.equal(one.read(each, box), other.read(each, box)), each


def in_float8(folder: Path, size: int, fmt: str | None = None) -> dict[str, torch.Tensor]:
    """The folder's experts quantised by transformers itself, under its names; returns what the stored tensors stand for, by transformers too."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [size, size]}
    config = SimpleNamespace(weight_block_size=(size, size), scale_fmt=fmt)
    quantise, dequantise = (op(SimpleNamespace(quantization_config=config)) for op in (Fp8Quantize, Fp8Dequantize))
    exact = load_file(folder / "model.safetensors")
    stored = dict(exact)
    for key in [each for each in exact if ".experts." in each]:
        pair = quantise.convert({key: exact[key]})
        stored |= pair
        values, scales = pair.values()
        exact[key] = dequantise._dequantize_one(values, scales, torch.float32)
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    return exact


@pytest.mark.parity
@pytest.mark.parametrize("fmt", [None, "ue8m0", "bytes"])
@pytest.mark.parametrize("apart", [False, True])
def test_scales_of_experts_have_the_names_and_the_meaning_of_transformers(apart, fmt, tmp_path):
    """One by one and in stacks; scales as numbers, and as exponents of 2 of either dtype."""
    release(tmp_path / "plain", hybrid(True, ahead=1), apart)
    shutil.copytree(tmp_path / "plain", tmp_path / "fp8")
    exact = in_float8(tmp_path / "fp8", 16, fmt and "ue8m0")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    at = "model.language_model.layers.0.mlp.experts"
    names = [f"{at}.3.up_proj.weight_scale_inv"] if apart else [f"{at}.gate_up_proj_scale_inv", f"{at}.down_proj_scale_inv"]
    assert set(names) < set(tensors) and (apart or tensors[names[0]].shape == (4, 4, 4))
    if fmt == "bytes":
        narrow = {key: tensor.view(torch.uint8) if key.endswith("_scale_inv") else tensor for key, tensor in tensors.items()}
        save_file(narrow, tmp_path / "fp8" / "model.safetensors")
    save_file({key: tensor.contiguous() for key, tensor in exact.items()}, tmp_path / "plain" / "model.safetensors")
    one, other = open_weights(tmp_path / "fp8"), open_weights(tmp_path / "plain")
    for each in one.shapes():
        assert torch.equal(one.read(each), other.read(each)), each


@pytest.mark.parametrize("apart", [False, True])
def test_missing_scales_of_experts_are_told_by_name(apart, tmp_path):
    release(tmp_path / "hub", hybrid(True), apart)
    in_float8(tmp_path / "hub", 16)
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    weight = "model.language_model.layers.1.mlp.experts." + ("2.up_proj.weight" if apart else "gate_up_proj")
    scales = tensors.pop(f"{weight}_scale_inv")
    save_file(tensors, tmp_path / "hub" / "model.safetensors")
    said = rf"missing: {re.escape(weight)}_scale_inv\n{re.escape(weight)} is stored in float8_e4m3fn and needs {re.escape(weight)}_scale_inv: .*16 x 16"
    with pytest.raises(CheckpointError, match=said):
        open_weights(tmp_path / "hub")
    save_file({**tensors, f"{weight}.scale": scales}, tmp_path / "hub" / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"used by nothing: {re.escape(weight)}\.scale \(nearest: {re.escape(weight)}_scale_inv"):
        open_weights(tmp_path / "hub")
    save_file({**tensors, f"{weight}_scale_inv": scales[..., :1].contiguous()}, tmp_path / "hub" / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{re.escape(weight)}_scale_inv has shape .*blocks of 16 x 16 of"):
        open_weights(tmp_path / "hub")


# ---------------------------------------------------------------- what does not fit


def edited(source: Path, folder: Path, **text: Any) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in text.items():
        part, _, field = key.partition("__")
        config[part] = {**config[part], field: value}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_another_size_of_the_family_is_told_by_name_and_both_shapes(tmp_path):
    release(tmp_path / "hub", seeing(False))
    with pytest.raises(
        CheckpointError,
        match=r"mlp\.gate_proj\.weight has shape \[96, 64\]; by config\.json layers\.0\.feed_forward\.w1\.weight needs \[112, 64\]",
    ):
        open_weights(edited(tmp_path / "hub", tmp_path / "wide", text_config__intermediate_size=112))
    with pytest.raises(CheckpointError, match=r"missing: model\.language_model\.layers\.3\."):
        open_weights(edited(tmp_path / "hub", tmp_path / "deep", text_config__num_hidden_layers=4))
    with pytest.raises(CheckpointError, match=r"visual\.pos_embed\.weight has shape \[16, 32\].*needs \[25, 32\]"):
        open_weights(edited(tmp_path / "hub", tmp_path / "table", vision_config__num_position_embeddings=25))
    release(tmp_path / "hybrid", hybrid(True))
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj has shape \[4, 64, 64\].*needs \[8, 64, 64\]"):
        open_weights(edited(tmp_path / "hybrid", tmp_path / "more", text_config__num_experts=8))


@pytest.mark.parametrize("config,hint", [(seeing(False), "intarsia-qwen3"), (hybrid(False), "no vision_config")])
def test_a_text_only_checkpoint_is_told_as_such(config, hint, tmp_path):
    release(tmp_path / "hub", config)
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if ".visual." not in name}, tmp_path / "hub" / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.visual\.(.|\n)*The folder has no vision tower.*{hint}"):
        open_weights(tmp_path / "hub")


def test_text_models_of_families_that_only_see_are_no_architecture(tmp_path):
    release(tmp_path / "hub", seeing(False))
    text = {**theirs_of(seeing(False))["text_config"], "architectures": ["Qwen3VLForCausalLM"]}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(text))
    with pytest.raises(UsageError, match="No installed model family reads the architecture 'Qwen3VLForCausalLM'"):
        open_weights(tmp_path / "hub")


@pytest.mark.parametrize("hidden", [32, 24])
def test_experts_that_transformers_saves_are_not_transposed(hidden, tmp_path):
    """It reads both forms by their shape, and takes a stack of square matrices (hidden 32) as it is; here the other stack decides."""
    config = seeing(True)
    layers = tuple(chz.replace(block, feed_forward=softmax_experts(4, 2, hidden)) for block in config.layers)
    config = chz.replace(config, layers=layers)
    values = release(tmp_path / "hub", config)
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    shutil.copytree(tmp_path / "hub", tmp_path / "theirs")
    turned = {name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()}
    save_file(turned, tmp_path / "theirs" / "model.safetensors")
    for folder in ("hub", "theirs"):
        weights = open_weights(tmp_path / folder)
        assert all(torch.equal(weights.read(name), value) for name, value in values.items()), folder
    one, other = (reference(config, tmp_path / folder) for folder in ("hub", "theirs"))
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(one.get_parameter(name), other.get_parameter(name)) == (hidden != 32)


@pytest.mark.parametrize("moe", [False, True])
def test_text_only_folders_of_the_hybrid(moe, tmp_path):
    """They are written as Qwen3_5ForCausalLM, with a layer of multi-token prediction where there is one, and read like this, with the names of a folder of a model that sees, and by a
    `text_config` without a `vision_config`: transformers writes any of these."""
    config = hybrid(moe, ahead=1, sees=False)
    values = release(tmp_path / "hub", config)
    theirs, tensors = theirs_of(config), load_file(tmp_path / "hub" / "model.safetensors")
    assert theirs["architectures"] == ["Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"] and "text_config" not in theirs
    assert not [name for name in tensors if "language_model" in name or "visual" in name]
    assert {"model.layers.3.self_attn.q_proj.weight", "model.embed_tokens.weight", "model.norm.weight", "mtp.fc.weight"} < set(tensors)

    def named(name: str) -> str:
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name

    shutil.copytree(tmp_path / "hub", tmp_path / "prefixed")
    save_file({named(name): tensor for name, tensor in tensors.items()}, tmp_path / "prefixed" / "model.safetensors")
    shutil.copytree(tmp_path / "prefixed", tmp_path / "nested")
    seeing_theirs = theirs_of(hybrid(moe, ahead=1))
    del seeing_theirs["vision_config"]
    (tmp_path / "nested" / "config.json").write_text(json.dumps(seeing_theirs))
    for folder in ("hub", "prefixed", "nested"):
        weights = open_weights(tmp_path / folder)
        assert weights.model == config, folder
        assert all(torch.equal(weights.read(name), value) for name, value in values.items()), folder
    assert not any(parameter.is_meta for parameter in reference(config, tmp_path / "hub").parameters())
    tensors["model.visual.merger.norm.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "hub" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight\n.*used by nothing: model\.visual\.merger\.norm\.weight"):
        open_weights(tmp_path / "hub")


def test_a_folder_of_text_may_name_no_tokens_of_images(tmp_path):
    """transformers' text_config has none: they mean nothing to a model without a tower, whatever its vocabulary."""
    config = hybrid(False, sees=False)
    release(tmp_path / "hub", config)
    theirs = {key: value for key, value in theirs_of(config).items() if not key.endswith("_token_id")}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(theirs))
    weights = open_weights(tmp_path / "hub")
    assert weights.model.vocab_size == 264 and weights.model.image_id == 248056


def test_every_parameter_has_one_place_in_a_folder():
    for name in ("qwen3_vl_235b_a22b",):
        config = getattr(qwen3_vl, name)()
        with torch.device("meta"):
            model = current().build(config)
        names = {each for each, _ in model.named_parameters()}
        rows = choose(expand(table_of(config), len(model.regions().blocks), names=names, sizes=whole_numbers(theirs_of(config))))
        assert sorted(each for row in rows for each in row.ours) == sorted(names)
