"""Hugging Face folders of Qwen3 with experts, both ways: as transformers saves them, fused as it has them in memory, and in float8 as released; what does not fit is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia.checkpoint import open_weights
from intarsia.cli import main
from intarsia.contracts import Box
from intarsia.errors import CheckpointError, UsageError
from intarsia_eager.context import TrainContext
from intarsia_generation import SamplingConfig, load
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

RECIPE = f"{Path(__file__).parents[1] / 'e2e' / 'train_recipes.py'}:tiny"
EXPERTS = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """The reference, its folder, and a run made of it. One layer is dense."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=264,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    reference = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    base = tmp_path_factory.mktemp("hf")
    reference.save_pretrained(base / "theirs", max_shard_size="40KB")
    assert main(["checkpoint", "import", str(base / "theirs"), str(base / "run"), "--from", "hf", "--option", f"recipe={RECIPE}"]) == 0
    return reference, base / "theirs", base / "run"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def with_tensors(folder: Path, tensors: dict[str, torch.Tensor], into: Path, **changes: Any) -> Path:
    into.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, **changes}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, into / "model.safetensors")
    return into


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As transformers 5 has them in memory."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (0, 2):
        base = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{base}.{e}.{name}_proj.weight"] for e in range(EXPERTS)]) for name in ("gate", "up", "down")
        )
        out |= {f"{base}.gate_up_proj": torch.cat((gate, up), 1), f"{base}.down_proj": down}
    return out


def logits_of(path: Path, tokens_BS: torch.Tensor) -> torch.Tensor:
    model = load(path, tokenizer="byte", device="cpu").model
    rows, tokens = tokens_BS.shape
    with torch.no_grad():
        return model.project(model(tokens_BS, TrainContext(torch.arange(tokens).expand(rows, tokens), None, ((tokens,),) * rows)))


TOKENS_BS = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(1))


@pytest.mark.parity
def test_logits_and_64_greedy_tokens(pair: tuple[Any, Path, Path], tmp_path: Path) -> None:
    reference, folder, run = pair
    with torch.no_grad():
        expected = reference(input_ids=TOKENS_BS).logits
    for path in (folder, run, with_tensors(folder, fused(tensors_of(folder)), tmp_path / "fused")):
        assert (logits_of(path, TOKENS_BS) - expected).abs().max() <= 1e-5 * expected.abs().max()
    prompt_BS = TOKENS_BS[:1, :7]
    theirs = reference.generate(prompt_BS, max_new_tokens=64, do_sample=False, pad_token_id=0)[0, 7:].tolist()
    (ours,) = load(run, tokenizer="byte", device="cpu").generate(
        [prompt_BS[0].tolist()], SamplingConfig(max_tokens=64, temperature=0.0, ignore_eos=True)
    )
    assert list(ours.tokens) == theirs and len(theirs) == 64


@pytest.mark.parity
def test_transformers_loads_what_is_exported(pair: tuple[Any, Path, Path], tmp_path: Path) -> None:
    """Experts are apart, as in their own folder, tensor for tensor."""
    reference, folder, run = pair
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(run), str(out), "--to", "hf", "--option", "shard_size=40KB"]) == 0
    theirs, ours = tensors_of(folder), tensors_of(out)
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    loaded, notes = transformers.Qwen3MoeForCausalLM.from_pretrained(
        out, attn_implementation="eager", output_loading_info=True, dtype="auto"
    )
    assert not any(notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=TOKENS_BS).logits, reference(input_ids=TOKENS_BS).logits)


def test_both_layouts_are_read_in_boxes(pair: tuple[Any, Path, Path], tmp_path: Path) -> None:
    """A process that has two of the experts reads these, whichever way they lie in the file."""
    _, folder, _ = pair
    tensors = tensors_of(folder)
    both = [open_weights(folder), open_weights(with_tensors(folder, fused(tensors), tmp_path / "fused"))]
    for short, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        whole = torch.stack([tensors[f"model.layers.2.mlp.experts.{e}.{short}_proj.weight"] for e in range(EXPERTS)])
        box = Box((1, 3, 5), (2, 9, 11))
        for reader in both:
            assert torch.equal(reader.read(f"layers.2.feed_forward.experts.{name}", box), whole[1:3, 3:12, 5:16])
    mixed = fused(tensors) | {name: each for name, each in tensors.items() if ".layers.0.mlp.experts.0." in name}
    with pytest.raises(CheckpointError, match=r"used by nothing: model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight"):
        open_weights(with_tensors(folder, mixed, tmp_path / "mixed"))


def test_float8_releases_are_dequantised(pair: tuple[Any, Path, Path], tmp_path: Path) -> None:
    """Every projection, with one scale for each block; the head, norms, routers and embeddings are as they are."""
    _, folder, _ = pair
    tensors, exact = tensors_of(folder), {}
    stored = dict(tensors)
    for name, tensor in tensors.items():
        exact[name] = tensor
        if "_proj" in name:
            rows, columns = (-(-size // 16) for size in tensor.shape)
            scales = 0.01 + torch.rand(rows, columns, generator=torch.Generator().manual_seed(len(name)))
            spread = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[: tensor.shape[0], : tensor.shape[1]]
            stored[name], stored[f"{name}_scale_inv"] = (tensor / spread).to(torch.float8_e4m3fn), scales
            exact[name] = stored[name].float() * spread
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    reader = open_weights(with_tensors(folder, stored, tmp_path / "fp8", quantization_config=config))
    assert torch.equal(reader.read("layers.1.feed_forward.w2.weight"), exact["model.layers.1.mlp.down_proj.weight"])
    for e in range(EXPERTS):
        found = reader.read("layers.0.feed_forward.experts.w3", Box((e, 0, 0), (1, 24, 48)))[0]
        assert torch.equal(found, exact[f"model.layers.0.mlp.experts.{e}.up_proj.weight"])
    assert torch.equal(reader.read("layers.0.feed_forward.router.weight"), tensors["model.layers.0.mlp.gate.weight"])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"model_type": "qwen2_moe"}, "model_type = 'qwen2_moe'"),
        ({"architectures": ["Qwen2ForCausalLM"]}, r"architecture 'Qwen2ForCausalLM'.*Qwen3ForCausalLM"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}, "longrope"),
    ],
)
def test_what_this_family_does_not_have_is_named(pair: tuple[Any, Path, Path], tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    shutil.copytree(pair[1], tmp_path / "changed")
    config = json.loads((tmp_path / "changed" / "config.json").read_text())
    (tmp_path / "changed" / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UsageError, match=text):
        open_weights(tmp_path / "changed")


def test_another_size_is_told_with_both_shapes(pair: tuple[Any, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of tensors and config in one folder, and of a folder and a recipe."""
    folder = pair[1]
    bad = with_tensors(folder, tensors_of(folder), tmp_path / "bad", hidden_size=64)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight has shape \[264, 48\]; by config\.json tok_embeddings\.weight needs \[264, 64\]"
    ):
        open_weights(bad)
    arguments = ["train", "qwen3/moe-debug", "--init-from", str(folder), "--dir", str(tmp_path / "runs"), "train.steps=1"]
    assert main(arguments) == 5
    assert "tok_embeddings.weight has shape [264, 48], the model's has [320, 128]" in capsys.readouterr().err
