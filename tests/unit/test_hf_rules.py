"""Hugging Face tables applied to tensors: every op both ways, strictness, ties."""

from __future__ import annotations

import pytest
import torch
from intarsia.contracts import HFRule, HFTable
from intarsia.errors import CheckpointError, PluginError
from intarsia_huggingface.rules import apply_rules, expand

TABLE = HFTable(
    rules=(
        HFRule("emb", "embedding"),
        HFRule("layers.{i}.w_t", "blocks.{i}.w", op="transpose"),
        HFRule("layers.{i}.q", "blocks.{i}.q", op="rope_half_to_pairs", heads="heads"),
        HFRule("layers.{i}.qkv", ("blocks.{i}.a", "blocks.{i}.b"), op="split:2"),
        HFRule("layers.{i}.experts.{e}.w", "blocks.{i}.experts", op="stack"),
        HFRule("head", "head"),
    ),
    config_to_ours="x:y",
    config_to_theirs="x:z",
    ignored=("*.inv_freq",),
)
SETTINGS = {"sizes": {"heads": 2}, "experts": 3, "shapes": {f"blocks.{i}.{n}": (rows, 2) for i in range(2) for n, rows in (("a", 4), ("b", 2))}}


def theirs():
    made = {"emb": torch.randn(5, 2), "head": torch.randn(5, 2)}
    for i in range(2):
        made |= {
            f"layers.{i}.w_t": torch.randn(2, 3),
            f"layers.{i}.q": torch.arange(8.0)[:, None] + i,
            f"layers.{i}.qkv": torch.randn(6, 2),
        }
        made |= {f"layers.{i}.experts.{e}.w": torch.full((2, 2), float(e)) for e in range(3)}
    return made


def test_there_and_back():
    given = theirs()
    ours = apply_rules(TABLE, given, 2, "import", **SETTINGS)
    assert ours["blocks.0.w"].shape == (3, 2) and ours["blocks.1.experts"][:, 0, 0].tolist() == [0, 1, 2]
    assert ours["blocks.0.a"].shape == (4, 2) and ours["blocks.0.b"].shape == (2, 2)
    assert ours["blocks.0.q"][:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7], "in each head, halves become pairs"
    back = apply_rules(TABLE, ours, 2, "export", **SETTINGS)
    assert set(back) == set(given) and all(torch.equal(back[name], given[name]) for name in given)


def test_strict_in_both_directions():
    given = theirs()
    with pytest.raises(CheckpointError, match="missing: head"):
        apply_rules(TABLE, {n: t for n, t in given.items() if n != "head"}, 2, "import", **SETTINGS)
    with pytest.raises(CheckpointError, match=r"nothing uses: layers\.2\.q"):
        apply_rules(TABLE, {**given, "layers.2.q": torch.ones(1)}, 2, "import", **SETTINGS)
    apply_rules(TABLE, {**given, "layers.0.rotary.inv_freq": torch.ones(1)}, 2, "import", **SETTINGS)
    ours = apply_rules(TABLE, given, 2, "import", **SETTINGS)
    with pytest.raises(CheckpointError, match=r"missing: blocks\.1\.b"):
        apply_rules(TABLE, {n: t for n, t in ours.items() if n != "blocks.1.b"}, 2, "export", **SETTINGS)


def test_ties():
    tied = {"aliases": {"head": "embedding"}, **SETTINGS}
    given = theirs()
    without = {n: t for n, t in given.items() if n != "head"}
    ours = apply_rules(TABLE, without, 2, "import", **tied)
    assert "head" not in ours and "head" not in apply_rules(TABLE, ours, 2, "export", **tied)
    apply_rules(TABLE, {**without, "head": given["emb"].clone()}, 2, "import", **tied)
    with pytest.raises(CheckpointError, match="head and emb differ"):
        apply_rules(TABLE, given, 2, "import", **tied)


def test_rows_that_do_not_add_up():
    with pytest.raises(CheckpointError, match=r"layers\.0\.qkv -> blocks\.0\.a, blocks\.0\.b has 6 rows"):
        apply_rules(TABLE, theirs(), 2, "import", **{**SETTINGS, "shapes": {**SETTINGS["shapes"], "blocks.0.a": (5, 2)}})


@pytest.mark.parametrize(
    "rule,message",
    [
        (HFRule("a", "b", op="transposed"), "transposed"),
        (HFRule("a.{i}", "b"), "only one side"),
        (HFRule("a", ("b", "c")), "2 names"),
        (HFRule("a.{e}", "b"), "stack"),
        (HFRule("a", "b", op="rope_half_to_pairs"), "heads"),
    ],
)
def test_malformed_rules(rule, message):
    with pytest.raises(PluginError, match=message):
        expand(HFTable(rules=(rule,), config_to_ours="x:y", config_to_theirs="x:z"), 1)
