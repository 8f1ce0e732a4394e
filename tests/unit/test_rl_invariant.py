"""The table of the batch-invariant mode, the transform that follows it, and what is refused by name before a run."""

from __future__ import annotations

import asyncio
import dataclasses

import chz
import pytest
from intarsia import ops, plugins
from intarsia.config import resolve
from intarsia.contracts import KernelEntry
from intarsia.errors import UsageError
from intarsia_rl.controller.service import parts_of
from intarsia_rl.invariant import table
from intarsia_rl.invariant.check import check_recipe, kernel_problems, problems
from intarsia_rl.invariant.parity.command import _listing, _supported
from intarsia_rl.invariant.transform import batch_invariant
from intarsia_testing.rollout_doubles import InProcessWorkers, Said, ScriptedGenerators


def recipe(name="llama3/debug", *overrides):
    return resolve(name, ("train.device=cpu", *overrides), ("batch_invariant",)).recipe


def refusals(of, choices=None):
    return " ".join(problems(of, plugins.current(), table.kernels("cpu") if choices is None else choices, {}))


def test_every_operator_has_a_row_on_every_device_and_every_kernel_promises_invariance():
    offered = {entry.full_name: entry for entry in plugins.current().registry("kernel").entries() if isinstance(entry, KernelEntry)}
    for device in ("cpu", "cuda"):
        assert set(table.operators(device)) == set(ops.operators())
        for op in table.operators(device):
            for row in table.rows_of(op, device):
                if row.kernel == "reference":
                    assert ops.operators()[op].invariant, op
                else:
                    entry = offered[row.kernel]
                    assert entry.op == op and entry.invariant and set(row.dtypes) <= set(entry.dtypes), row.kernel
                    assert device == "cuda" or "cuda" not in entry.needs, row.kernel


def test_operators_of_plugins_that_are_not_installed_are_left_out(monkeypatch):
    registry = plugins.current().registry("operator")
    theirs = {entry.name for entry in registry.entries()}
    assert set(table.OF_CORE) == set(ops.operators()) - theirs
    assert set(recipe().kernels) == {*table.OF_CORE, *theirs}
    monkeypatch.setattr(type(registry), "entries", lambda self: ())
    fresh = chz.replace(recipe(), kernels={})
    assert set(batch_invariant(fresh).kernels) == set(table.OF_CORE)


def test_no_kernel_stands_twice_for_an_operator():
    rows = [(row.op, row.device, row.kernel) for row in table.ROWS]
    assert sorted(rows) == sorted(set(rows))


@pytest.mark.parametrize("name", ["llama3/debug", "deepseek_v3/debug", "qwen3/moe-debug"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_transform_chooses_what_the_check_takes(name, dtype):
    made = recipe(name, f"precision.compute={dtype}")
    choices = ops.select(made.kernels, plugins.current(), ("cpu",), dtype, invariant=True).choices
    check_recipe(made, plugins.current(), {op: choice.kernel for op, choice in choices.items()}, {})


def test_the_transform_keeps_a_kernel_of_the_table_that_was_named_and_drops_others():
    before = chz.replace(resolve("llama3/debug", ("train.device=cuda",)).recipe, kernels={"linear": "ascending", "attention": "sdpa"})
    kernels = batch_invariant(before).kernels
    assert kernels["linear"] == "intarsia-kernels:linear/ascending" and kernels["attention"] == "intarsia-kernels:attention/blocks"


def test_a_kernel_outside_of_the_table_is_refused_by_name():
    found = refusals(recipe(), {**table.kernels("cpu"), "linear": "intarsia-kernels:onednn"})
    assert "Kernel 'intarsia-kernels:onednn' of operator 'linear'" in found and "linear/tiled is" in found


def test_an_operator_outside_of_the_table_is_refused_by_name():
    assert "Operator 'third_party_mix' is not in its table for cpu" in refusals(recipe(), {"third_party_mix": "reference"})


def test_a_kernel_that_sums_in_the_order_of_the_batch_is_refused_where_it_is_chosen():
    """Even where its entry lies: by name, and by selection where it does not even promise."""
    with pytest.raises(UsageError, match=r"onednn.*does not promise results that are independent of the batch"):
        ops.select({**recipe().kernels, "linear": "onednn"}, plugins.current(), ("cpu", "onednn", "avx512"), "float32", invariant=True)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("compile.mode=model", "compile.mode is model"),
        ("mesh.tp=2", "mesh.tp=2"),
        ("precision.compute=float16", "precision.compute is float16"),
        ("sharder.payload=fp8", "float8"),
    ],
)
def test_settings_that_break_it_are_refused(override, words):
    assert words in refusals(recipe("llama3/debug", override))


def test_parts_of_a_model_that_break_it_are_refused():
    made = recipe("deepseek_v3/debug")
    layers = made.model.layers
    number = next(n for n, layer in enumerate(layers) if hasattr(layer.feed_forward, "router"))
    assert "jitter" in refusals(recipe("deepseek_v3/debug", f"model.layers.{number}.feed_forward.router.jitter=0.1"))


def test_recurrences_and_towers_are_refused_by_name_with_the_reason():
    """Once for each component, however many layers have it; and what a generator says of states when it is asked all the same."""
    text = refusals(recipe("qwen3_5/debug"))
    assert "Model family 'intarsia-qwen3-5:qwen3_5'" in text and "'intarsia-models-common:vision_tower' at model.vision is not" in text
    assert text.count("gated_delta_net'") == 1 and "model.layers.0.attention and 2 more places" in text
    assert "operator gated_delta_rule" in text and "token by token" in text


def test_a_generator_of_another_dtype_or_on_another_device_is_refused(monkeypatch):
    assert "generator.dtype is bfloat16 and precision.compute float32" in refusals(
        recipe("arithmetic/debug", "data.loader.generator.dtype=bfloat16")
    )
    assert "generator.device=cuda is cuda here, and the trainer computes on cpu" in refusals(
        recipe("arithmetic/debug", "data.loader.generator.device=cuda")
    )
    assert not refusals(recipe("arithmetic/debug", "data.loader.generator.dtype=float32", "data.loader.generator.device=cpu"))
    made = recipe("arithmetic/debug")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "generator.device=auto is cuda here" in refusals(made)


def test_steps_that_could_show_no_gap_are_refused():
    assert "data.loader.audit=0 leaves steps" in refusals(recipe("arithmetic/debug", "data.loader.audit=0"))
    assert not refusals(recipe("arithmetic/debug", "data.loader.audit=0", "data.loader.max_lag=0")) and not refusals(
        recipe("arithmetic/debug")
    )


def test_a_generator_that_cannot_score_is_refused_where_tokens_may_be_older(tmp_path):
    made = recipe("arithmetic/debug")
    generators = ScriptedGenerators(lambda request: Said([0, 12]))
    generators.facts = dataclasses.replace(generators.facts, capabilities=("invariant",))
    workers = InProcessWorkers(plugins.current().build(made.data.loader.environment))

    def parts(of):
        return asyncio.run(parts_of(of, plugins.current(), tmp_path, generators, workers, plugins.current().build(of.loss.algorithm)))

    with pytest.raises(UsageError, match=r"cannot score tokens of older weights anew \(capability `forced`\)"):
        parts(made)
    parts(recipe("arithmetic/debug", "data.loader.max_lag=0"))
    parts(resolve("arithmetic/debug").recipe)


def test_a_generator_that_is_cut_is_refused_with_the_reason():
    text = refusals(recipe("arithmetic/debug", "data.loader.generator.tensor=2"))
    assert "generator.tensor=2: each rank multiplies a part of a row" in text and "data.loader.generators" in text


def test_the_environment_is_checked():
    kernels = {"linear": "intarsia-kernels:linear/unsplit"}
    for environment, words in (({}, "it is not set"), ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "':4096:8'")):
        (found,) = kernel_problems(kernels, "cuda", "bfloat16", environment)
        assert "CUBLAS_WORKSPACE_CONFIG=:0:0" in found and words in found
    assert not kernel_problems(kernels, "cuda", "bfloat16", {"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    assert "float32" in kernel_problems(kernels, "cuda", "float32", {"CUBLAS_WORKSPACE_CONFIG": ":0:0"})[0]
    assert "ONEDNN" in kernel_problems({}, "cpu", "float32", {"ONEDNN_DEFAULT_FPMATH_MODE": "bf16"})[0]


def test_kernels_that_go_with_one_another_are_chosen_together_and_refused_apart():
    """A cache that is read through tables has the bits of one kernel of attention, and of no other."""
    before = resolve("llama3/debug", ("train.device=cuda",)).recipe

    def chosen(**named):
        kernels = batch_invariant(chz.replace(before, kernels=named)).kernels
        pair = {op: kernels[op] for op in ("attention", "paged_attention")}
        return pair, kernel_problems(pair, "cuda", "bfloat16", {})

    pair, found = chosen()
    assert pair["paged_attention"] == "intarsia-kernels:paged_attention/blocks" and not found
    pair, found = chosen(attention="unsplit")
    assert pair == {"attention": "intarsia-kernels:attention/unsplit", "paged_attention": "reference"} and not found
    pair, found = chosen(attention="unsplit", paged_attention="split")  # which is not in the table, and so names nothing
    assert pair["paged_attention"] == "reference" and not found
    _, (problem,) = chosen(attention="unsplit", paged_attention="blocks")
    assert "paged_attention/blocks" in problem and "'intarsia-kernels:attention/unsplit' is in force" in problem
    assert problem.endswith("Use reference.")


def test_all_reasons_are_given_at_once():
    with pytest.raises(UsageError, match=r"compile.mode(.|\n)*mesh.tp=2(.|\n)*parity --list"):
        check_recipe(recipe("llama3/debug", "compile.mode=model", "mesh.tp=2"), plugins.current(), table.kernels("cpu"), {})


def test_the_list_names_every_kernel_and_reason():
    text, facts = _listing(), _supported()
    for row in table.ROWS:
        assert row.kernel in text and row.why in text
    for name, why in table.REFUSED.items():
        assert f"{name}: {why}" in text and facts["refused"][name] == why
    assert facts["devices"]["cpu"]["dtypes"] == ["float32", "bfloat16"] and "intarsia-models-common:mla" in facts["components"]


def test_numbers_that_are_none_do_not_settle_how_a_shape_is_multiplied() -> None:
    import torch
    from intarsia_kernels.invariant import products

    x_NI, weight_OI = torch.full((48, 37), float("nan")), torch.randn(29, 37)
    before = set(products._whole)
    assert products.product(x_NI, weight_OI).isnan().all()
    assert set(products._whole) == before
    products.product(torch.randn(48, 37), weight_OI)
    assert len(products._whole) == len(before) + 1
