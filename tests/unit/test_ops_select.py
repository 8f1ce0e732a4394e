"""Which kernel runs, why, and what a user is told when it cannot."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from intarsia import ops
from intarsia.contracts import KernelEntry
from intarsia.errors import UsageError
from intarsia.ops.operator import find
from intarsia_testing.operator_calls import record


def shifted(x_ND, weight_D, eps):
    """A kernel for rms_norm whose result shows that it ran; it refuses two rows."""
    return ops.rms_norm.reference(x_ND, weight_D, eps) + 100


shifted.supports = lambda x_ND, weight_D, eps: "two rows" if x_ND.shape[0] == 2 else None


def kernel(name, op="rms_norm", owner="fakes", **fields):
    return KernelEntry(name=name, op=op, owner=owner, target="x:y", doc="A fake.", **{"priority": 10, **fields})


class FakePlugins:
    def __init__(self, *entries):
        self._entries = entries

    def registry(self, kind):
        assert kind in ("kernel", "operator")
        return self if kind == "kernel" else FakePlugins()

    def entries(self):
        return list(self._entries)

    def target(self, entry):
        return shifted


def choose(kernels, *entries, capabilities=("cpu",), dtype="float32", op="rms_norm", **settings):
    return ops.select(kernels, FakePlugins(*entries), capabilities, dtype, **settings).choices[op]


def test_auto_takes_the_highest_priority_that_fits_and_says_why_not_the_others():
    entries = kernel("gpu", priority=30, needs=("cuda", "sm90")), kernel("half", priority=20, dtypes=("bfloat16",)), kernel("fits")
    choice = choose({"*": "auto"}, *entries, capabilities=("cpu", "cuda"))
    assert choice.kernel == "fakes:fits" and choice.function is shifted
    assert "lacks sm90" in choice.reason and "bfloat16" in choice.reason and "priority (10)" in choice.reason


def test_auto_without_kernels_is_the_reference():
    choice = choose({})
    assert choice.kernel == "reference" and choice.function is None and "no kernel is installed" in choice.reason


def test_priority_zero_runs_only_when_named():
    assert choose({}, kernel("slow", priority=0)).kernel == "reference"
    assert choose({"rms_norm": "slow"}, kernel("slow", priority=0)).kernel == "fakes:slow"


@pytest.mark.parametrize(
    "fields,settings,missing",
    [
        ({"needs": ("cuda", "triton")}, {}, "lacks cuda, triton"),
        ({"dtypes": ("float16",)}, {}, "computes in float32"),
        ({}, {"compiled": True}, "compiled region"),
        ({}, {"invariant": True}, "independent of the batch"),
    ],
)
def test_a_named_kernel_that_cannot_run_says_what_is_missing(fields, settings, missing):
    with pytest.raises(UsageError, match=f"fakes:mine.*{missing}"):
        choose({"rms_norm": "mine"}, kernel("mine", **fields), **settings)


def test_unknown_operators_and_kernels_get_the_nearest():
    with pytest.raises(UsageError, match="rms_norm"):
        choose({"rmsnorm": "auto"})
    with pytest.raises(UsageError, match="'triton'"):
        choose({"rms_norm": "tritn"}, kernel("triton"))
    with pytest.raises(UsageError, match="'triton'"):
        choose({"*": "tritn"}, kernel("triton"))


def test_star_names_a_kernel_where_an_operator_has_it():
    selection = ops.select({"*": "triton"}, FakePlugins(kernel("triton"), kernel("triton", op="rope")), ("cpu",), "float32")
    assert selection.choices["rope"].kernel == "fakes:triton"
    assert selection.choices["attention"].kernel == "reference"
    assert set(selection.facts()["rope"]) == {"value", "reason"}


def test_the_operator_overrules_the_star():
    assert choose({"*": "reference", "rms_norm": "mine"}, kernel("mine")).kernel == "fakes:mine"
    assert choose({"*": "mine", "rms_norm": "reference"}, kernel("mine")).kernel == "reference"


def test_two_owners_of_a_name():
    entries = kernel("mine"), kernel("mine", owner="others")
    with pytest.raises(UsageError, match="fakes:mine and others:mine"):
        choose({"rms_norm": "mine"}, *entries)
    assert choose({"rms_norm": "others:mine"}, *entries).kernel == "others:mine"


def test_a_saved_choice_chooses_the_same_again():
    entries = kernel("low"), kernel("high", priority=20)
    first = ops.select({}, FakePlugins(*entries), ("cpu",), "float32")
    saved = {op: fact["value"] for op, fact in first.facts().items()}
    again = ops.select(saved, FakePlugins(*entries, kernel("new", priority=99)), ("cpu",), "float32")
    assert {op: choice.kernel for op, choice in again.choices.items()} == saved


def test_in_compiled_regions_auto_keeps_pointwise_and_norm_references_unless_measured(tmp_path, monkeypatch):
    entry = kernel("mine", in_compile=True)
    assert choose({}, entry, compiled=True).kernel == "reference"
    assert "fuses" in choose({}, entry, compiled=True).reason
    assert choose({}, entry, compiled=True, measured={"fakes:mine": 0.9}).kernel == "reference"
    assert choose({}, entry, compiled=True, measured={"fakes:mine": 1.3}).kernel == "fakes:mine"
    assert choose({}, kernel("mine", op="attention", in_compile=True), compiled=True, op="attention").kernel == "fakes:mine"
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"fakes:mine": 1.3}))
    monkeypatch.setenv("INTARSIA_KERNEL_MEASUREMENTS", str(path))
    assert choose({}, entry, compiled=True).kernel == "fakes:mine"
    path.write_text("[1]")
    with pytest.raises(UsageError, match=r"measured\.json"):
        choose({}, entry, compiled=True)


def test_invariant_mode_refuses_what_promises_nothing():
    others = [kernel(op, op=op, invariant=True) for op in ("attention", "cross_entropy", "linear")]
    choice = choose({}, *others, kernel("batch_sum", priority=50), kernel("steady", invariant=True), invariant=True)
    assert choice.kernel == "fakes:steady" and "batch_sum" in choice.reason
    with pytest.raises(UsageError, match="attention"):
        ops.select({}, FakePlugins(kernel("fast", op="attention")), ("cpu",), "float32", invariant=True)
    with pytest.raises(UsageError, match="reference of attention"):
        ops.select({"attention": "reference"}, FakePlugins(*others), ("cpu",), "float32", invariant=True)


def test_install_and_fall_back_with_a_reason_logged_once(caplog):
    choice = ops.Choice("fakes:mine", "a test", shifted)
    x, weight = torch.ones(3, 4), torch.ones(4)
    with ops.installed({"rms_norm": choice}), caplog.at_level(logging.INFO, "intarsia.ops"):
        assert ops.rms_norm(x, weight, 1e-5).min() > 50
        for _ in range(2):
            assert ops.rms_norm(x[:2], weight, 1e-5).max() < 50
        with record() as calls:
            ops.rms_norm(x, weight, eps=1e-5)
            ops.rms_norm(x[:2], weight, 1e-5)
    assert ops.rms_norm(x, weight, 1e-5).max() < 50, "what was in force before is in force again"
    assert [record.getMessage() for record in caplog.records if "two rows" in record.getMessage()].__len__() == 1
    assert [(call.op, call.kernel, call.shapes["0"], call.dtypes["1"]) for call in calls] == [
        ("rms_norm", "fakes:mine", (3, 4), "float32"),
        ("rms_norm", "reference", (2, 4), "float32"),
    ]


def test_recording_ends_with_its_block():
    with record() as calls:
        ops.swiglu(torch.ones(2), torch.ones(2))
    ops.swiglu(torch.ones(2), torch.ones(2))
    assert [call.op for call in calls] == ["swiglu"]


def test_install_puts_every_choice_in_force():
    ops.install(ops.select({}, FakePlugins(kernel("mine")), ("cpu",), "float32"))
    assert find("rms_norm").choice.kernel == "fakes:mine"
    assert ops.rms_norm(torch.ones(3, 4), torch.ones(4), 1e-5).min() > 50


def test_our_triton_kernel_is_refused_by_name_where_there_is_no_gpu():
    from intarsia.plugins import current

    with pytest.raises(UsageError, match="lacks cuda, triton"):
        ops.select({"rms_norm": "triton"}, current(), ("cpu",), "float32")
