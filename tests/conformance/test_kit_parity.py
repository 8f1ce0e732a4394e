"""The kit's parity tests find what is wrong, name the layer, tell a tie from an error, and print a table that leaves pytest's last line alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia_testing.parity_greedy import compare
from intarsia_testing.parity_layers import Difference, counterparts, first_layer
from intarsia_testing.parity_table import measured, parity_table

from tests.numerics import test_llama3_parity as llama3
from tests.numerics import test_qwen3_5_parity as qwen3_5
from tests.numerics import test_qwen3_parity as qwen3
from tests.numerics import test_qwen3_vl_parity as qwen3_vl


def broken(parent: type, damage: Any) -> Any:
    """A family's tests with ours damaged after its weights were read."""

    class Broken(parent):  # type: ignore[misc]
        def _both(self):
            theirs, ours, table = super()._both()
            with torch.no_grad():
                damage(ours)
            return theirs, ours, table

    return Broken()


def scaled(name: str) -> Any:
    return lambda model: model.get_parameter(name).mul_(1.02)


@pytest.mark.parity
@pytest.mark.parametrize(
    "parent,batch,damage,words",
    [
        (llama3.TestPlain, "text", scaled("layers.1.feed_forward.w1.weight"), r"layers\.1 \(theirs: model\.layers\.1\), .*in it first feed_forward\.w1 \(mlp\.gate_proj\).* before it agree"),
        (llama3.TestPlain, "text", scaled("tok_embeddings.weight"), r"is tok_embeddings \(theirs: model\.embed_tokens\)"),
        (llama3.TestPlain, "text", scaled("head.weight"), r"is head \(theirs: lm_head\), .*The 4 before it agree"),
        (llama3.TestPlain, "text", lambda model: model.rope.frequencies_d.mul_(1.1), r"layers\.0 \(theirs: model\.layers\.0\), .*in it first attention\.wo \(self_attn\.o_proj\)"),
        (qwen3.TestExperts, "text", lambda model: model.layers[1].feed_forward.router.weight.add_(0.1 * torch.randn(8, 64)), r"is layers\.1 .*in it first feed_forward"),
        (qwen3_vl.TestDense, "mixed", scaled("visual.blocks.1.attention.wo.weight"), r"is visual\.blocks\.1 \(theirs: model\.visual\.blocks\.1\), .*in it first attention\.wo \(attn\.proj\)"),
        (qwen3_vl.TestExperts, "mixed", scaled("layers.2.feed_forward.experts.w2"), r"is layers\.2 \(theirs: model\.language_model\.layers\.2\)"),
        (qwen3_5.TestDense, "images", scaled("layers.1.attention.wv.weight"), r"is layers\.1 \(theirs: model\.language_model\.layers\.1\)"),
    ],
)  # fmt: skip
def test_the_layer_that_is_wrong_is_named(parent, batch, damage, words):
    with pytest.raises(pytest.fail.Exception, match=words):
        broken(parent, damage).test_logits_agree(batch)


@pytest.mark.parity
def test_other_damage_is_found():
    wrong = broken(llama3.TestPlain, scaled("layers.1.attention.wv.weight"))
    with pytest.raises(pytest.fail.Exception, match=r"the gradient of .* differs"):
        wrong.test_gradients_agree("text")
    with pytest.raises(pytest.fail.Exception, match=r"token \d+ of row|logits of greedy tokens differ"):
        wrong.test_greedy_tokens_agree("text")
    with pytest.raises(pytest.fail.Exception, match=r"export after import changes \['model\.layers\.1\.self_attn\.v_proj\.weight"):
        wrong.test_export_gives_their_weights_back()
    with pytest.raises(pytest.fail.Exception, match="after export differ"):
        wrong.test_folders_go_round()


@pytest.mark.parity
def test_caches_that_are_wrong_are_found(monkeypatch):
    """Logits of whole rows agree, and those of generation do not: positions that do not go on behind an image, say."""
    from intarsia_generation import CacheContext

    monkeypatch.setattr(CacheContext, "_shown", lambda self, extra, valid_BS: extra)
    case = qwen3_vl.TestDense()
    case.greedy_tokens = 4
    case.test_logits_agree("images")
    with pytest.raises(pytest.fail.Exception, match=r"greedy tokens differ|token . of row"):
        case.test_greedy_tokens_agree("images")


def test_a_tie_is_no_error_and_an_error_no_tie():
    theirs = torch.tensor([[[0.0, 1.0, 1.0 - 1e-6], [0.0, 2.0, 1.0]]])
    chosen = theirs.argmax(-1)
    same = compare(chosen, theirs, theirs.clone(), 1e-5)
    assert (same.ties, same.wrong, same.error, same.tokens) == (0, "", 0.0, 2) and same.margin == pytest.approx(5e-7, rel=0.1)
    near = theirs.clone()
    near[0, 0, 2] += 2e-6
    tied = compare(chosen, theirs, near, 1e-5)
    assert (tied.ties, tied.wrong) == (1, "") and tied.error < 2e-6
    far = theirs.clone()
    far[0, 1, 2] = 2.5
    wrong = compare(chosen, theirs, far, 1e-5)
    assert wrong.ties == 0 and wrong.wrong.startswith("token 2 of row 0 is 2, and theirs 1, whose logit is 5.0e-01 higher")


def test_layers_without_a_counterpart_are_said():
    assert first_layer([], ["layers.0"], 1e-5).startswith("No layer could be compared")
    assert "it is what comes behind them" in first_layer([Difference("layers.0", "m.0", 1e-7)], ["layers.0"], 1e-5)
    found = [Difference("visual.blocks.0", "v.0", 1e-7), Difference("visual", "v", 1.0), Difference("layers.0.w", "m.0.w", 1.0)]
    found += [Difference("layers.0", "m.0", float("nan"))]
    assert first_layer(found, ["visual.blocks.0", "layers.0"], 1e-5) == (
        "The first layer that differs is layers.0 (theirs: m.0), by nan; in it first w (w), by 1.0e+00. The 1 before it agree to 1.0e-07."
    )


def test_modules_correspond_by_what_is_beneath_them():
    from intarsia_huggingface.rules import Row

    def tree(**parts: Any) -> torch.nn.Module:
        module = torch.nn.Module()
        for name, part in parts.items():
            module.add_module(name, part)
        return module

    def linear() -> torch.nn.Module:
        return torch.nn.Linear(2, 2, bias=False)

    ours = tree(block=tree(q=linear(), k=linear(), o=linear()), extra=linear())
    theirs = tree(layer=tree(attn=tree(qk=linear(), out=linear())), extra=linear())
    rows = [
        Row(("layer.attn.qk.weight",), ("block.q.weight", "block.k.weight"), "split:2", ""),
        Row(("layer.attn.out.weight",), ("block.o.weight",), "same", ""),
        Row(("extra.weight",), ("extra.weight",), "same", ""),
    ]
    assert counterparts(rows, ours, theirs) == {"block": "layer.attn", "block.o": "layer.attn.out", "extra": "extra"}


def test_the_table():
    found = [
        measured("A", "text", "logits", 1e-6, 1e-5),
        measured("A", "text", "logits", 2e-6, 1e-5),
        measured("A", "text", "greedy", 0.0, 1e-5, "64 of 64, margin 1e-03"),
        measured("B long", "mixed", "logits", float("nan"), 1e-5),
        measured("B long", "mixed", "loss", 2e-3, 1e-5),
    ]
    assert parity_table(found) == [
        "family  batch  logits   greedy                            loss",
        "A       text   2.0e-06  0.0e+00 (64 of 64, margin 1e-03)",
        "B long  mixed  nan!                                       2.0e-03!",
        "2 of 4 measurements are above what is allowed.",
    ]
    assert parity_table([]) == []


def test_the_table_stands_before_pytests_last_line(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(
        "from intarsia_testing.parity_table import PARITY, measured\n"
        "def test_it(record_property):\n    record_property(PARITY, measured('Mine', 'text', 'logits', 1e-7, 1e-5))\n"
        "def test_nothing():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0, done.stdout
    assert any("intarsia parity" in line for line in lines) and "Mine    text   1.0e-07" in lines
    assert lines[-1].startswith("2 passed")
    plain = subprocess.run([*command, "-k", "nothing"], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert "parity" not in plain.stdout
