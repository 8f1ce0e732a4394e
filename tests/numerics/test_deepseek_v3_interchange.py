"""Hugging Face folders of DeepSeek-V3, both ways: logits and greedy tokens agree after import and after export; float8 releases are dequantised as they are read;
the layer of multi-token prediction goes both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia.checkpoint import open_weights
from intarsia.cli import main
from intarsia.contracts import Box
from intarsia.errors import CheckpointError, UsageError
from intarsia.plugins import current
from intarsia_checkpoint_formats.reader import open_checkpoint
from intarsia_deepseek_v3.hf import config_to_theirs
from intarsia_eager.context import TrainContext
from intarsia_generation import SamplingConfig, load
from intarsia_huggingface.rules import apply_rules
from intarsia_testing.model import fill
from safetensors import safe_open
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

RECIPE = f"{Path(__file__).parents[1] / 'e2e' / 'train_recipes.py'}:tiny"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}


def make_reference() -> Any:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        max_position_embeddings=256,
        num_nextn_predict_layers=0,
        rope_parameters=YARN,
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        for layer in model.model.layers[1:]:
            layer.mlp.gate.e_score_correction_bias.normal_(std=0.1)
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Any, Path, Path]:
    base = tmp_path_factory.mktemp("hf")
    reference = make_reference()
    reference.save_pretrained(base / "theirs", max_shard_size="200KB")
    assert main(["checkpoint", "import", str(base / "theirs"), str(base / "run"), "--from", "hf", "--option", f"recipe={RECIPE}"]) == 0
    return reference, base / "theirs", base / "run"


def logits(reference: Any, tokens_BS: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return reference(input_ids=tokens_BS).logits


def our_logits(path: Path, tokens_BS: torch.Tensor) -> torch.Tensor:
    model = load(path, tokenizer="byte", device="cpu").model
    rows, tokens = tokens_BS.shape
    context = TrainContext(torch.arange(tokens).expand(rows, tokens), None, ((tokens,),) * rows)
    with torch.no_grad():
        return model.project(model(tokens_BS, context))


def random_tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(1))


@pytest.mark.parity
@pytest.mark.parametrize("source", ["folder", "run"])
@pytest.mark.parametrize("form", ["auto", "plain"])
def test_logits_and_64_greedy_tokens(pair, source, form):
    """Generation reads the latent cache, by the absorbed form where that is cheaper and by the plain one."""
    reference, folder, run = pair
    path = folder if source == "folder" else run
    tokens_BS = random_tokens()
    assert (our_logits(path, tokens_BS) - logits(reference, tokens_BS)).abs().max() <= 1e-5
    prompt_BS = tokens_BS[:1, :7]
    theirs = reference.generate(prompt_BS, max_new_tokens=64, do_sample=False, pad_token_id=0)[0, 7:].tolist()
    generator = load(path, tokenizer="byte", device="cpu")
    for layer in generator.model.layers:
        layer.attention.form = form
    (ours,) = generator.generate([prompt_BS[0].tolist()], SamplingConfig(max_tokens=64, temperature=0.0, ignore_eos=True))
    assert list(ours.tokens) == theirs and len(theirs) == 64


@pytest.mark.parity
def test_transformers_loads_what_is_exported(pair, tmp_path):
    reference, _, run = pair
    assert main(["checkpoint", "export", str(run), str(tmp_path / "out"), "--to", "hf", "--option", "shard_size=200KB"]) == 0
    loaded, notes = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True, dtype="auto"
    )
    assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens_BS = random_tokens()
    assert torch.equal(logits(loaded.eval(), tokens_BS), logits(reference, tokens_BS))
    assert torch.equal(our_logits(tmp_path / "out", tokens_BS), our_logits(run, tokens_BS))


def test_the_selection_bias_is_a_buffer_and_keeps_float32(pair, tmp_path):
    reference, folder, run = pair
    name = "layers.1.feed_forward.router.bias"
    record = open_checkpoint(run).manifest.tensors[f"model/{name}"]
    assert (record.kind, record.dtype) == ("replicated", "float32")
    assert torch.equal(open_weights(folder).read(name), reference.model.layers[1].mlp.gate.e_score_correction_bias)
    assert main(["checkpoint", "export", str(run), str(tmp_path / "out"), "--to", "hf", "--option", "dtype=bfloat16"]) == 0
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        dtypes = {key: file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118 - not a mapping
    assert dtypes.pop("model.layers.1.mlp.gate.e_score_correction_bias") == torch.float32
    assert dtypes.pop("model.layers.2.mlp.gate.e_score_correction_bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    router = load(folder, tokenizer="byte", device="cpu", dtype="bfloat16").model.layers[1].feed_forward.router
    assert router.weight.dtype == router.bias.dtype == torch.float32


# ---------------------------------------------------------------- float8


def quantised(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Payload, scales, and what they stand for: by loops over blocks, edges partial."""
    rows, columns = weight.shape
    payload, exact = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            where = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[where].abs().max() / 448
            payload[where] = (weight[where] / scales[i, j]).to(torch.float8_e4m3fn)
            exact[where] = payload[where].float() * scales[i, j]
    return payload, scales, exact


def released(pair, folder: Path, block: tuple[int, int] = (24, 20)) -> dict[str, torch.Tensor]:
    """A folder as DeepSeek releases it, in small blocks; returns the values that it stands for."""
    _, theirs, _ = pair
    folder.mkdir()
    stored, exact = {}, {}
    for path in sorted(theirs.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            exact[name] = stored[name] = tensor
            if "_proj" in name:
                stored[name], stored[f"{name}_scale_inv"], exact[name] = quantised(tensor, block)
    names = sorted(stored)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: stored[name] for name in part}, folder / file)
    places = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = json.loads((theirs / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return exact


def ours_of(exact: dict[str, torch.Tensor], reference: Any) -> dict[str, torch.Tensor]:
    entry = current().registry("model").find("deepseek_v3")
    from intarsia.plugins import import_reference

    table = import_reference(entry.hf)
    model = current().build(import_reference(table.config_to_ours)(reference.config.to_dict()))
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    sizes = {key: value for key, value in reference.config.to_dict().items() if type(value) is int}
    return apply_rules(table, exact, 3, "import", sizes=sizes, experts=8, names=names)


def test_float8_folders_equal_the_dequantised_reference(pair, tmp_path):
    exact = released(pair, tmp_path / "fp8")
    expected, weights = ours_of(exact, pair[0]), open_weights(tmp_path / "fp8")
    assert set(weights.shapes()) == set(expected)
    for name, whole in expected.items():
        assert torch.equal(weights.read(name), whole), name
        for fraction in (2, 3):  # boxes that begin and end inside blocks
            start = tuple(size // fraction for size in whole.shape)
            box = Box(start, tuple(max(1, size // 2) - 1 or 1 for size in whole.shape))
            cut = tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))
            assert torch.equal(weights.read(name, box), whole[cut]), name
    assert weights.dtype("layers.1.feed_forward.experts.w1") == "float32"


def test_only_the_boxes_bytes_are_read(pair, tmp_path, monkeypatch):
    from intarsia_huggingface.safetensors_file import SafetensorsFile

    released(pair, tmp_path / "fp8")
    weights, read = open_weights(tmp_path / "fp8"), []
    plain = SafetensorsFile.read
    monkeypatch.setattr(SafetensorsFile, "read", lambda self, name, box=None: (read.append((name, box)), plain(self, name, box))[1])
    weights.read("layers.1.feed_forward.experts.w2", Box((5, 30, 0), (2, 10, 32)))
    names = [f"model.layers.1.mlp.experts.{e}.down_proj.weight{suffix}" for e in (5, 6) for suffix in ("_scale_inv", "")]
    assert [name for name, _ in read] == names, "scales first: what cannot be is told before weights are read"
    assert read[0][1] == Box((1, 0), (1, 2)) and read[1][1] == Box((30, 0), (10, 32))


@pytest.mark.parametrize(
    "damage,words",
    [
        ("scale missing", ("missing: model.layers.0.self_attn.o_proj.weight_scale_inv",)),
        ("scale surplus", ("used by nothing", "model.norm.weight_scale_inv")),
        ("scale shape", ("o_proj.weight_scale_inv has shape [1, 1]", "need [3, 4]")),
    ],
)
def test_wrong_scales_are_named(pair, tmp_path, damage, words):
    released(pair, tmp_path / "fp8")
    index = tmp_path / "fp8" / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    file = tmp_path / "fp8" / places[name]
    tensors = load_file(file)
    if damage == "scale missing":
        del tensors[name], places[name]
    elif damage == "scale surplus":
        places["model.norm.weight_scale_inv"], tensors["model.norm.weight_scale_inv"] = file.name, torch.ones(1)
    else:
        tensors[name] = torch.ones(1, 1)
    save_file(tensors, file)
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError) as caught:
        open_weights(tmp_path / "fp8")
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("change", [{"quant_method": "gptq"}, {"fmt": "e5m2"}, {"weight_block_size": None}, {"weight_block_size": [128]}])
def test_other_quantisations_are_refused_by_name(pair, tmp_path, change):
    released(pair, tmp_path / "fp8")
    path = tmp_path / "fp8" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(UsageError, match="quantization_config"):
        open_weights(tmp_path / "fp8")


def test_float8_folders_train_and_generate(pair, tmp_path):
    released(pair, tmp_path / "fp8", (128, 128))
    (text,) = load(tmp_path / "fp8", tokenizer="byte", device="cpu").generate([[1, 2, 3]], SamplingConfig(max_tokens=2, ignore_eos=True))
    assert len(text.tokens) == 2
    assert main(["checkpoint", "import", str(tmp_path / "fp8"), str(tmp_path / "run"), "--from", "hf", "--option", f"recipe={RECIPE}"]) == 0
    tokens_BS = random_tokens()
    assert torch.equal(our_logits(tmp_path / "run", tokens_BS), our_logits(tmp_path / "fp8", tokens_BS))


# ---------------------------------------------------------------- multi-token prediction


def with_depths(folder: Path, depths: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of a model with so many depths, as released: layers behind the last, with copies of embedding and head."""
    from intarsia.plugins import import_reference
    from intarsia_deepseek_v3.config import deepseek_v3, v3_router
    from intarsia_models_common.config import MLAConfig, RopeConfig

    ours = deepseek_v3(
        dim=32,
        layers=2,
        dense_layers=1,
        attention=MLAConfig(heads=2, kv_rank=8, q_rank=8, nope_dim=8, rope_dim=4, value_dim=8),
        dense_hidden=32,
        router=v3_router(experts=4, top_k=2, groups=2, top_groups=1, scale=2.5),
        expert_hidden=16,
        shared_experts=1,
        vocab_size=264,
        rope=RopeConfig(interleaved=True),
        max_positions=256,
        ahead=depths,
    )
    model = fill(current().build(ours), 0, 0.05)
    table = import_reference(current().registry("model").find("deepseek_v3").hf)
    theirs = config_to_theirs(ours)
    kept = {name: buffer for name, buffer in model.named_buffers() if name.endswith("router.bias")}
    values = {**dict(model.named_parameters()), **kept}
    sizes = {key: value for key, value in theirs.items() if type(value) is int}
    aliases = {other: group[0] for group in model.regions().ties for other in group[1:]}
    tensors = apply_rules(table, values, 4, "export", sizes=sizes, experts=4, names=set(values), aliases=aliases)
    folder.mkdir()
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(theirs))
    return folder, {name: tensor.detach() for name, tensor in values.items()}


@pytest.mark.parametrize("depths", [1, 2])
def test_depths_are_the_layers_behind_the_last(tmp_path, depths):
    folder, values = with_depths(tmp_path / "theirs", depths)
    names = set(load_file(folder / "model.safetensors"))
    for layer in range(2, 2 + depths):
        extra = (
            "enorm",
            "hnorm",
            "eh_proj",
            "embed_tokens",
            "shared_head.norm",
            "shared_head.head",
            "mlp.experts.3.up_proj",
            "self_attn.q_a_proj",
        )
        assert {f"model.layers.{layer}.{name}.weight" for name in extra} <= names
    weights = open_weights(folder)
    assert set(weights.shapes()) == set(values) and "following_embeddings.weight" not in values
    assert all(torch.equal(weights.read(name), value) for name, value in values.items())
    run = tmp_path / "run"
    assert main(["checkpoint", "import", str(folder), str(run), "--from", "hf", "--option", f"recipe={RECIPE}"]) == 0
    assert main(["checkpoint", "export", str(run), str(tmp_path / "out"), "--to", "hf"]) == 0
    one, other = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_copies_that_differ_and_depths_that_are_missing_are_named(tmp_path):
    folder, _ = with_depths(tmp_path / "theirs", 1)
    tensors = load_file(folder / "model.safetensors")
    wrong = {**tensors, "model.layers.2.shared_head.head.weight": tensors["lm_head.weight"] + 1}
    save_file(wrong, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"shared_head\.head\.weight and lm_head\.weight differ"):
        open_weights(folder)
    save_file(
        {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name or "layers" not in name},
        folder / "model.safetensors",
    )
    open_weights(folder)  # a copy may be left out
    save_file({name: tensor for name, tensor in tensors.items() if "layers.2" not in name}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.enorm\.weight.*\n.*num_nextn_predict_layers"):
        open_weights(folder)
