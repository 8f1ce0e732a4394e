"""Hugging Face folders that are wrong: names both ways, shapes, ties, indices, configs; boxes through every rule; import's and export's refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia.checkpoint import open_weights
from intarsia.cli import main
from intarsia.contracts import Box, HFRule, HFTable
from intarsia.errors import CheckpointError, NumericsError, UsageError
from intarsia_huggingface.boxes import read_box
from intarsia_huggingface.hf_format import converted, parse_size
from intarsia_huggingface.rules import expand, to_ours
from safetensors.torch import load_file, save_file

RECIPE = f"{Path(__file__).parents[1] / 'e2e' / 'train_recipes.py'}:tiny"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {EMBEDDING: (264, 16), HEAD: (264, 16), "model.norm.weight": (16,)}
    for i in range(2):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.{name}.weight": (16,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {
            f"{at}.self_attn.{name}_proj.weight": size for name, size in zip("qkvo", [(16, 16), (8, 16), (8, 16), (16, 16)], strict=True)
        }
        shapes |= {f"{at}.mlp.{name}_proj.weight": size for name, size in (("gate", (24, 16)), ("up", (24, 16)), ("down", (16, 24)))}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """A folder; `change` edits its tensors, `config` its config.json."""

    def call(change: Callable[[dict[str, torch.Tensor]], object] = lambda found: None, **config: Any) -> Path:
        found = tensors()
        change(found)
        folder = tmp_path / "theirs"
        folder.mkdir(exist_ok=True)
        save_file(found, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({key: value for key, value in {**CONFIG, **config}.items() if value != "absent"}))
        return folder

    return call


def problem(folder: Path, kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        open_weights(folder)
    return str(caught.value)


def test_a_sound_folder(make):
    weights = open_weights(make())
    assert weights.model.dim == 16 and weights.tokenizer is None and weights.stop_ids == ()
    assert torch.equal(weights.read("layers.1.feed_forward.w2.weight"), tensors()["model.layers.1.mlp.down_proj.weight"])
    with pytest.raises(UsageError, match=r"no parameter 'layers\.1\.feed_forward\.w9\.weight'.*w[123]"):
        weights.read("layers.1.feed_forward.w9.weight")


def test_missing_and_surplus_names_are_listed_together_with_the_nearest(make):
    def change(found):
        found["model.layers.1.self_attn.q_prj.weight"] = found.pop("model.layers.1.self_attn.q_proj.weight")
        found["model.layers.2.mlp.up_proj.weight"] = torch.ones(1)
        del found["model.norm.weight"]

    text = problem(make(change))
    assert "missing: model.layers.1.self_attn.q_proj.weight, model.norm.weight" in text
    assert "model.layers.1.self_attn.q_prj.weight (nearest: model.layers.1.self_attn.q_proj.weight)" in text
    assert "model.layers.2.mlp.up_proj.weight" in text


def test_what_the_table_ignores_is_ignored(make):
    open_weights(make(lambda found: found.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})))


def test_shapes_and_dtypes(make):
    text = problem(make(intermediate_size=25))
    assert "model.layers.0.mlp.gate_proj.weight has shape [24, 16]; by config.json layers.0.feed_forward.w1.weight needs [25, 16]" in text
    text = problem(make(lambda found: found.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)})))
    assert "model.norm.weight is stored in int8" in text


QUANTISED = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 16]}}


@pytest.mark.parametrize("value, sound", [(0.5, True), (0.0, True), (float("nan"), False), (float("inf"), False), (-1.0, False)])
def test_scales_that_make_no_weights(make, value, sound):
    name = "model.layers.0.self_attn.o_proj.weight"

    def quantise(found):
        found[name] = found[name].to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = torch.tensor([[1.0], [value]])

    weights = open_weights(make(quantise, **QUANTISED))
    if sound:
        assert weights.read("layers.0.attention.wo.weight").isfinite().all()
        return
    with pytest.raises(CheckpointError, match=r"o_proj.weight_scale_inv has scales that are negative or not finite"):
        weights.read("layers.0.attention.wo.weight")


def test_quantised_weights_whose_config_does_not_say_so(make):
    def quantise(found):
        name = "model.layers.0.self_attn.o_proj.weight"
        found[name], found[f"{name}_scale_inv"] = found[name].to(torch.float8_e4m3fn), torch.ones(2, 1)

    text = problem(make(quantise))
    assert "o_proj.weight_scale_inv" in text and "config.json has no quantization_config" in text
    assert "quantization_config" not in problem(make(lambda found: found.update({"model.norms.weight": torch.ones(16)})))


def test_a_recipe_that_does_not_go_with_the_folders_model(make, tmp_path, capsys):
    run = tmp_path / "run"
    assert (
        main(["checkpoint", "import", str(make(max_position_embeddings=8)), str(run), "--from", "hf", "--option", f"recipe={RECIPE}"]) == 2
    )
    told = capsys.readouterr().err
    assert "does not go with the model of" in told and "the model has only 8 positions" in told
    assert not run.exists()


def test_ties(make):
    untied_without_head = problem(make(lambda found: found.pop(HEAD)))
    assert f"missing: {HEAD}" in untied_without_head and "not tied" in untied_without_head
    assert open_weights(make(lambda found: found.pop(HEAD), tie_word_embeddings=True)).shapes().get("head.weight") is None
    open_weights(make(lambda found: found.update({HEAD: found[EMBEDDING].clone()}), tie_word_embeddings=True))
    text = problem(make(tie_word_embeddings=True))
    assert f"{HEAD} and {EMBEDDING} differ" in text and "tie_word_embeddings" in text


@pytest.mark.parametrize(
    "config,words",
    [
        ({"architectures": ["LlamaForCausalML"]}, ("'LlamaForCausalML'", "Did you mean 'LlamaForCausalLM'")),
        ({"architectures": "absent"}, ("names no `architectures`",)),
        ({"hidden_size": "absent"}, ("lacks 'hidden_size'", "llama3")),
        ({"num_key_value_heads": 3}, ("attention.heads = 2 is not a multiple",)),
        ({"attention_bias": True}, ("attention_bias = True",)),
        ({"hidden_size": "wide"}, ("llama3 can read",)),
        ({"quantization_config": {"bits": 4}}, ("quantization_config",)),
    ],
)
def test_configs(make, config, words):
    text = problem(make(**config), UsageError)
    assert all(word in text for word in words), text


def test_a_config_that_is_no_json(make):
    folder = make()
    (folder / "config.json").write_text("{")
    assert "not valid JSON" in problem(folder)


def test_indices(make):
    folder = make()
    found = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(found)
    halves = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, part in halves.items():
        save_file({name: found[name] for name in part}, folder / file)
    places = {name: file for file, part in halves.items() for name in part}

    def index(weight_map: Any) -> Path:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return folder

    weights = open_weights(index(places))
    assert torch.equal(weights.read("tok_embeddings.weight"), found[EMBEDDING])
    assert "model-3.safetensors" in problem(index({**places, "x": "model-3.safetensors"}))
    text = problem(index({**{name: file for name, file in places.items() if name != HEAD}, "x": "model-1.safetensors"}))
    assert "'x' in model-1.safetensors" in text and f"there and not listed: '{HEAD}'" in text
    assert "weight_map must be" in problem(index({"x": "../model-1.safetensors"}))
    assert "weight_map must be" in problem(index([]))
    (folder / "model.safetensors.index.json").unlink()
    open_weights(folder)  # without an index, all files together
    save_file({HEAD: found[HEAD]}, folder / "more.safetensors")
    assert f"'{HEAD}' is in model-1.safetensors as well" in problem(folder)


def test_pickles_are_never_read(make):
    folder = make()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in problem(folder)


def test_ids_that_end_a_text(make):
    folder = make(eos_token_id=2)
    assert open_weights(folder).stop_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert open_weights(folder).stop_ids == (5, 7)


RULES = HFTable(
    rules=(
        HFRule("same", "same"),
        HFRule("transposed", "transposed", op="transpose"),
        HFRule("q", "q", op="rope_half_to_pairs", heads="heads"),
        HFRule("qkv", ("a", "b", "c"), op="split:3"),
        HFRule("experts.{e}", "experts", op="stack"),
    ),
    config_to_ours="x:y",
    config_to_theirs="x:z",
)


def test_a_box_through_every_rule_is_a_slice_of_the_whole():
    random = torch.Generator().manual_seed(0)
    theirs = {
        name: torch.randn(shape, generator=random)
        for name, shape in (("same", (5, 3)), ("transposed", (3, 5)), ("q", (24, 3)), ("qkv", (9, 3)))
    }
    theirs |= {f"experts.{e}": torch.randn(4, 3, generator=random) for e in range(3)}
    shapes: dict[str, tuple[int, ...]] = {
        "same": (5, 3),
        "transposed": (5, 3),
        "q": (24, 3),
        "a": (4, 3),
        "b": (2, 3),
        "c": (3, 3),
        "experts": (3, 4, 3),
    }
    read_elements = 0

    def read(name: str, box: Box) -> torch.Tensor:
        nonlocal read_elements
        read_elements += box.numel
        return theirs[name][tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))]

    for row in expand(RULES, 1, 3):
        for index, whole in enumerate(to_ours(row, [theirs[name] for name in row.theirs], {"heads": 4}, shapes)):
            assert tuple(whole.shape) == shapes[row.ours[index]]
            for start in range(whole.shape[0]):
                for size in range(1, whole.shape[0] - start + 1):
                    tail = (1,) * (whole.ndim - 1)
                    box = Box((start, *tail), (size, *(n - 1 for n in whole.shape[1:])))
                    expected = whole[tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))]
                    read_elements = 0
                    assert torch.equal(read_box(row, index, box, read, {"heads": 4}, shapes), expected), (row, box)
                    assert read_elements == box.numel or row.op == "rope_half_to_pairs"


def test_conversion_that_would_lose_a_value():
    assert converted(torch.tensor([1.0, float("inf")]), "float16", "x").isinf().tolist() == [False, True]
    with pytest.raises(NumericsError, match="x: 2 values are too large for float16"):
        converted(torch.tensor([1e5, -1e6, 1.0]), "float16", "x")


def test_sizes():
    assert [parse_size(text) for text in ("17", "2KB", "1.5MB", "5GB", "1GiB", "3kb")] == [17, 2000, 1500000, 5 * 10**9, 1 << 30, 3000]
    for text in ("", "5TB", "many", "0", "-3GB"):
        with pytest.raises(UsageError, match=r"bytes?"):
            parse_size(text)


def test_import_and_export_refuse(make, tmp_path, capsys):
    folder, run = make(), tmp_path / "run"

    def call(*arguments: str) -> tuple[int, str]:
        code = main(["checkpoint", *arguments])
        return code, capsys.readouterr().err

    arguments = ("import", str(folder), str(run), "--from", "hf")
    assert "--option recipe=NAME" in call(*arguments)[1]
    assert "Did you mean 'recipe'" in call(*arguments, "--option", "recipes=x")[1]
    assert "float32" in call(*arguments, "--option", f"recipe={RECIPE}", "--option", "dtype=int8")[1]
    assert not run.exists()
    assert call(*arguments, "--option", f"recipe={RECIPE}", "--option", "dtype=bfloat16")[0] == 0
    assert "has a recipe already" in call(*arguments, "--option", f"recipe={RECIPE}")[1]
    assert call(*arguments)[0] == 0
    make(rope_theta=10000.0)
    assert "model.rope.theta is 500000.0, there 10000.0" in call(*arguments)[1]
    out = ("export", str(run), str(tmp_path / "out"), "--to", "hf")
    assert "Did you mean 'shard_size'" in call(*out, "--option", "shard_bytes=3")[1]
    assert "'int3'" in call(*out, "--option", "dtype=int3")[1]
    assert call(*out)[0] == 0
