"""Hugging Face tables applied to tensors: every op both ways, strictness, ties."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from intarsia.contracts import HFRule, HFTable
from intarsia.errors import CheckpointError, PluginError
from intarsia_huggingface.rules import apply_rules, expand, whole_numbers

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
SETTINGS = {
    "sizes": {"heads": 2},
    "experts": 3,
    "shapes": {f"blocks.{i}.{n}": (rows, 2) for i in range(2) for n, rows in (("a", 4), ("b", 2))},
}


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
        (HFRule("a", "b", op="same", heads="n"), "heads"),
        (HFRule("a", "b", op="transpose|flaten:2"), "'flaten:2' is none of"),
        (HFRule("a", "b", op="flatten"), "'flatten' is none of"),
        (HFRule("a", "b", op="flatten:*,*"), "one \\*"),
        (HFRule("a", ("b", "c"), op="split:2@2"), "'split:2@2' is none of"),
        (HFRule("a", ("b", "c"), op="split_heads:2@1", heads="n"), "is none of"),
        (HFRule("a", ("b", "c"), op="split:3"), "2 names of ours and op 'split:3'"),
        (HFRule("a.{e}", ("b", "c"), op="split:2|stack"), "stacks after it splits"),
        (HFRule("a", ("b", "c"), op="split:2|split:2"), "more than once"),
        (HFRule("a", "b", op="copy|transpose", heads="n"), "copy stands alone"),
    ],
)
def test_malformed_rules(rule, message):
    with pytest.raises(PluginError, match=message):
        expand(HFTable(rules=(rule,), config_to_ours="x:y", config_to_theirs="x:z"), 1)


BOTH = HFTable(
    rules=(
        HFRule("mlp.{e}.gate", "w1", op="stack"),
        HFRule("mlp.{e}.up", "w3", op="stack"),
        HFRule("mlp.gate_up", ("w1", "w3"), op="split:2@1"),
        HFRule("mlp.up_gate", ("w3", "w1"), op="transpose|split:2@1"),
    ),
    config_to_ours="x:y",
    config_to_theirs="x:z",
)


def test_alternatives():
    """The first whose names are there is read, the first is written; a mixture of two is not read."""
    w1, w3 = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    apart = {f"mlp.{e}.{n}": w[e] for e in range(2) for n, w in (("gate", w1), ("up", w3))}
    fused, turned = {"mlp.gate_up": torch.cat((w1, w3), 1)}, {"mlp.up_gate": torch.cat((w3, w1), 1).mT}
    for given in (apart, fused, turned):
        ours = apply_rules(BOTH, given, 1, "import", experts=2)
        assert torch.equal(ours["w1"], w1) and torch.equal(ours["w3"], w3)
        assert apply_rules(BOTH, ours, 1, "export", experts=2).keys() == apart.keys()
    with pytest.raises(CheckpointError, match=r"nothing uses: mlp\.gate_up"):
        apply_rules(BOTH, apart | fused, 1, "import", experts=2)
    with pytest.raises(CheckpointError, match=r"missing: mlp\.1\.up"):
        apply_rules(BOTH, {name: x for name, x in apart.items() if name != "mlp.1.up"}, 1, "import", experts=2)
    with pytest.raises(CheckpointError, match=r"missing: mlp\.0\.gate, mlp\.0\.up"):
        apply_rules(BOTH, {}, 1, "import", experts=2)
    with pytest.raises(PluginError, match="experts_field"):
        apply_rules(BOTH, apart, 1, "import")


def test_query_and_gate_rows_in_turn():
    """Qwen3.5's: of each head first the query's rows, then the gate's."""
    table = HFTable(
        rules=(HFRule("qg", ("q", "g"), op="split_heads:2", heads="text_config.heads"),), config_to_ours="x:y", config_to_theirs="x:z"
    )
    sizes = whole_numbers({"text_config": {"heads": 2, "tied": True, "eps": 1e-6}, "vocab": 9})
    assert sizes == {"text_config.heads": 2, "vocab": 9}
    ours = apply_rules(table, {"qg": torch.arange(12)[:, None]}, 1, "import", sizes=sizes)
    assert ours["q"].flatten().tolist() == [0, 1, 2, 6, 7, 8] and ours["g"].flatten().tolist() == [3, 4, 5, 9, 10, 11]
    with pytest.raises(CheckpointError, match="10 rows, no multiple of 4"):
        apply_rules(table, {"qg": torch.arange(10)[:, None]}, 1, "import", sizes=sizes)
    with pytest.raises(PluginError, match=r"text_config\.heads"):
        apply_rules(table, {"qg": torch.arange(12)[:, None]}, 1, "import", sizes={"text_config.head": 2})


def test_convolutions_are_matrices():
    table = HFTable(rules=(HFRule("conv", "w", op="flatten:c,2,*"),), config_to_ours="x:y", config_to_theirs="x:z")
    given = {"conv": torch.randn(5, 3, 2, 4)}
    ours = apply_rules(table, given, 1, "import", sizes={"c": 3})
    assert ours["w"].shape == (5, 24)
    assert torch.equal(apply_rules(table, ours, 1, "export", sizes={"c": 3})["conv"], given["conv"])
    with pytest.raises(CheckpointError, match="24 values in a row"):
        apply_rules(table, ours, 1, "export", sizes={"c": 5})


def test_rules_for_models_with_a_part_or_without():
    """The names of a part's neighbours depend on whether it is there; a field may have two spellings."""
    split = HFRule("{p}.q", ("q", "g"), "split_heads:2", "deep.heads|heads")
    rules = tuple(dataclasses.replace(split, theirs=split.theirs.replace("{p}", prefix)) for prefix in ("bare", "full"))
    table = dataclasses.replace(TABLE, rules=rules, extra={"where": {"bare.*": "!part", "full.*": "part"}})
    for names, expected in (({"q", "g"}, "bare.q"), ({"q", "g", "part"}, "full.q")):
        assert [row.theirs for row in expand(table, 1, names=names)] == [(expected,)]
    for field in ("heads", "deep.heads"):
        tensors = apply_rules(table, {"q": torch.ones(4, 1), "g": torch.zeros(4, 1)}, 1, "export", names={"q", "g"}, sizes={field: 2})
        assert tensors["bare.q"].flatten().tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    with pytest.raises(PluginError, match=r"needs the config's 'deep.heads\|heads'"):
        apply_rules(table, {"q": torch.ones(4, 1), "g": torch.zeros(4, 1)}, 1, "export", names={"q", "g"}, sizes={"other": 2})
