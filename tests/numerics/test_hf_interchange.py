"""Hugging Face folders, both ways: a tiny random LlamaForCausalLM and ours agree in logits and greedy tokens, after import and after export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia.checkpoint import open_weights
from intarsia.cli import main
from intarsia.config import rebuild
from intarsia.contracts import Box
from intarsia.plugins import current
from intarsia_checkpoint_formats.reader import open_checkpoint
from intarsia_checkpoint_formats.weights import CheckpointWeights
from intarsia_eager.context import TrainContext
from intarsia_generation import SamplingConfig, load

transformers = pytest.importorskip("transformers")

RECIPE = f"{Path(__file__).parents[1] / 'e2e' / 'train_recipes.py'}:tiny"
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
CASES = [("default", False), ("llama3", True)]


def make_reference(rope: str, tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters=ROPES[rope],
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module", params=CASES, ids=["untied", "tied"])
def pair(request, tmp_path_factory) -> tuple[Any, Path, Path]:
    """The reference, its folder (in shards, as save_pretrained writes them), and a run made of it by `intarsia checkpoint import`."""
    base = tmp_path_factory.mktemp("hf")
    reference = make_reference(*request.param)
    reference.save_pretrained(base / "theirs", max_shard_size="60KB")
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


@pytest.mark.parametrize("source", ["folder", "run"])
def test_logits_and_64_greedy_tokens(pair, source):
    reference, folder, run = pair
    path = folder if source == "folder" else run
    tokens_BS = random_tokens()
    assert (our_logits(path, tokens_BS) - logits(reference, tokens_BS)).abs().max() <= 1e-5
    prompt_BS = tokens_BS[:1, :7]
    theirs = reference.generate(prompt_BS, max_new_tokens=64, do_sample=False, pad_token_id=0)[0, 7:].tolist()
    (ours,) = load(path, tokenizer="byte", device="cpu").generate(
        [prompt_BS[0].tolist()], SamplingConfig(max_tokens=64, temperature=0.0, ignore_eos=True)
    )
    assert list(ours.tokens) == theirs and len(theirs) == 64


@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_transformers_loads_what_is_exported(pair, shard_size, tmp_path):
    reference, _, run = pair
    assert main(["checkpoint", "export", str(run), str(tmp_path / "out"), "--to", "hf", "--option", f"shard_size={shard_size}"]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert ("model.safetensors.index.json" in names) == (shard_size == "60KB") == ("model.safetensors" not in names)
    loaded, notes = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True, dtype="auto"
    )
    assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens_BS = random_tokens()
    assert torch.equal(logits(loaded.eval(), tokens_BS), logits(reference, tokens_BS))
    prompt_BS = tokens_BS[:1, :7]
    greedy = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(loaded.generate(prompt_BS, **greedy), reference.generate(prompt_BS, **greedy))
    assert torch.equal(our_logits(tmp_path / "out", tokens_BS), our_logits(run, tokens_BS))


def test_a_tied_head_is_written_once(pair, tmp_path):
    reference, _, run = pair
    assert main(["checkpoint", "export", str(run), str(tmp_path / "out"), "--to", "hf"]) == 0
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    tied = reference.config.tie_word_embeddings
    assert ("lm_head.weight" in names) == (not tied) and "model.embed_tokens.weight" in names
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is tied


def test_the_released_spelling_of_config_json(pair, tmp_path):
    """rope_theta and rope_scaling at the top, as Meta's released files have it, mean what transformers 5 writes as rope_parameters."""
    _, folder, _ = pair
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    for path in folder.glob("model*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_weights(tmp_path).model == open_weights(folder).model
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    tokens_BS = random_tokens()
    assert (our_logits(tmp_path, tokens_BS) - logits(loaded.eval(), tokens_BS)).abs().max() <= 1e-5


def test_dtype_on_export(pair, tmp_path):
    reference, _, run = pair
    assert main(["checkpoint", "export", str(run), str(tmp_path / "out"), "--to", "hf", "--option", "dtype=bfloat16"]) == 0
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    state = reference.state_dict()
    assert all(torch.equal(tensor, state[name].bfloat16()) for name, tensor in loaded.state_dict().items())


def test_boxes_equal_slices(pair):
    _, folder, run = pair
    ours, native = open_weights(folder), open_weights(run)
    assert isinstance(native, CheckpointWeights)
    assert ours.shapes() == native.shapes()
    for name, shape in ours.shapes().items():
        whole = native.read(name)
        start = tuple(size // 3 for size in shape)
        box = Box(start, tuple(max(1, size // 2) for size in shape))
        expected = whole[tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))]
        assert torch.equal(ours.read(name, box), expected), name


def test_the_imported_run_has_the_folders_model(pair):
    _, folder, run = pair
    manifest = open_checkpoint(run).manifest
    assert rebuild(manifest.facts["recipe"], current()).model == open_weights(folder).model
    assert manifest.step == 0
