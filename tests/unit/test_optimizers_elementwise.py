"""AdamW, Adam, Lion and SGD: torch's numbers, flat runs, state that is loaded or narrow, split masters, and what they refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from intarsia import plugins
from intarsia.comm import SelfCommunicator
from intarsia.contracts import OptimizerGroup
from intarsia.errors import PluginError, UsageError
from intarsia.parameters import join_master
from intarsia_optimizers import adamw, kernels, lion, sgd, updates
from intarsia_optimizers.config import AdamConfig, AdamWConfig, LionConfig, SGDConfig
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from _shards import SHAPES, Shards

BUILDS = {AdamWConfig: adamw.build, AdamConfig: adamw.build, LionConfig: lion.build, SGDConfig: sgd.build}
ALL = [AdamWConfig(lr=0.01), AdamConfig(lr=0.01, l2=0.05), LionConfig(lr=0.01), SGDConfig(lr=0.01, nesterov=True, weight_decay=0.2)]
IDS = ["adamw", "adam", "lion", "sgd"]


def built(config: Any, shards: Shards, groups: list[OptimizerGroup] | None = None) -> Any:
    return BUILDS[type(config)](config, groups or [OptimizerGroup("default", shards.parameters)], shards.table, SelfCommunicator())


def run(config: Any, shards: Shards, steps: int = 3, **options: Any) -> Any:
    optimizer = built(config, shards)
    for step in range(steps):
        shards.differentiate(step)
        optimizer.step(1.0, **options)
    return optimizer


def close(first: Shards, second: Shards, atol: float = 1e-6) -> None:
    for (name, one), other in zip(first.masters().items(), second.masters().values(), strict=True):
        assert torch.allclose(one.flatten(), other.flatten(), rtol=1e-5, atol=atol), name


def by_torch(kind: Any, shards: Shards, decay: float, steps: int = 3, **options: Any) -> dict[str, nn.Parameter]:
    copies = {name: nn.Parameter(value.detach().clone()) for name, value in shards.parameters.items()}
    vectors = [copies[name] for name, shape in SHAPES.items() if len(shape) < 2]
    matrices = [copies[name] for name, shape in SHAPES.items() if len(shape) >= 2]
    optimizer = kind([{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}], **options)
    for step in range(steps):
        shards.differentiate(step)
        for name, copy in copies.items():
            copy.grad = shards.parameters[name].grad.clone()  # type: ignore[union-attr]
        optimizer.step()
    return copies


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("implementation", ["auto", "fused", "foreach"])
def test_torchs_numbers(implementation: str, flat: bool) -> None:
    cases = [
        (AdamWConfig(lr=0.01, weight_decay=0.1, implementation=implementation), torch.optim.AdamW, 0.1, {"lr": 0.01, "betas": (0.9, 0.95)}),
        (AdamConfig(lr=0.01, l2=0.1, implementation=implementation), torch.optim.Adam, 0.1, {"lr": 0.01}),
        (
            SGDConfig(lr=0.1, l2=0.1, momentum=0.8, nesterov=True, implementation=implementation),
            torch.optim.SGD,
            0.1,
            {"lr": 0.1, "momentum": 0.8, "nesterov": True},
        ),
        (SGDConfig(lr=0.1, momentum=0.8, implementation=implementation), torch.optim.SGD, 0.0, {"lr": 0.1, "momentum": 0.8}),
        (SGDConfig(lr=0.1, momentum=0.0, implementation=implementation), torch.optim.SGD, 0.0, {"lr": 0.1}),
    ]
    for config, kind, decay, options in cases:
        shards = Shards(flat=flat)
        copies = by_torch(kind, Shards(), decay, **options)
        run(config, shards)
        for name, copy in copies.items():
            assert torch.allclose(shards.parameters[name], copy, rtol=1e-5, atol=1e-6), (config, name)


@pytest.mark.parametrize("split", [False, True])
def test_both_ways_of_sgd_decay_alike(split: bool) -> None:
    found = []
    for implementation in ("fused", "foreach"):
        shards = Shards(split=split)
        run(SGDConfig(lr=0.1, weight_decay=0.2, l2=0.1, nesterov=True, implementation=implementation), shards)
        found.append(shards)
    close(*found)


def test_sgd_is_fused_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def counting(values: Any, *arguments: Any, **options: Any) -> None:
        done.append(len(values))

    monkeypatch.setattr(torch, "_fused_sgd_", counting)
    run(SGDConfig(), Shards(), 1)
    assert len(done) > 1, "more than the probe"
    done.clear()
    run(SGDConfig(implementation="foreach"), Shards(), 1)
    assert not done

    def missing(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(torch, "_fused_sgd_", missing)
    run(SGDConfig(), Shards(), 1)
    with pytest.raises(UsageError, match=r"torch has no fused SGD for torch.float32 on cpu. Set optimizer.implementation=auto"):
        built(SGDConfig(implementation="fused"), Shards())


def test_lion_is_its_paper_in_float64() -> None:
    shards, lr, decay, (b1, b2) = Shards(), 0.01, 0.3, (0.9, 0.99)
    values = {name: value.detach().double() for name, value in Shards().parameters.items()}
    momenta = {name: torch.zeros_like(value) for name, value in values.items()}
    optimizer = built(LionConfig(lr=lr, weight_decay=decay, betas=(b1, b2)), shards)
    for step in range(4):
        shards.differentiate(step)
        for name, value in values.items():
            gradient = shards.parameters[name].grad.double()  # type: ignore[union-attr]
            shrunk = decay if len(SHAPES[name]) >= 2 else 0.0
            value.copy_((1 - lr * shrunk) * value - lr * torch.sign(b1 * momenta[name] + (1 - b1) * gradient))
            momenta[name] = b2 * momenta[name] + (1 - b2) * gradient
        optimizer.step(1.0)
    for name, value in values.items():
        assert torch.allclose(shards.parameters[name].double(), value, atol=1e-6), name


# ---------------------------------------------------------------- flat runs


def calls(config: Any, shards: Shards, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[int]]:
    """Sizes of the tensors that each call of a rule is given in one step."""
    optimizer, seen = built(config, shards), []
    rule = type(next(iter(optimizer._elementwise._rules)))
    plain = rule.plain

    def watched(self: Any, values: Any, *rest: Any) -> None:
        seen.append([value.numel() for value in values])
        plain(self, values, *rest)

    monkeypatch.setattr(rule, "plain", watched)
    shards.differentiate(0)
    optimizer.step(1.0, **options)
    return seen


@pytest.mark.parametrize("config", [AdamWConfig(decay_vectors=True), LionConfig(decay_vectors=True)])
def test_a_buffer_of_equal_settings_is_one_tensor(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards()
    # The whole buffer but for padding after the last.
    assert calls(config, shards, monkeypatch) == [[shards.offsets["layers.1.norm.weight"] + 8]]
    assert sorted(calls(config, Shards(flat=False), monkeypatch)[0]) == sorted(shards.numels.values())


def test_settings_part_runs_and_names_choose_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = Shards()
    # Norms do not decay and interrupt the matrices.
    matrices, vectors = calls(AdamWConfig(), shards, monkeypatch)
    assert len(matrices) == 2 and vectors == [8, 8]
    chosen = calls(AdamWConfig(), Shards(), monkeypatch, names=["layers.0.wo.weight", "layers.0.up.weight", "layers.1.wo.weight"])
    assert chosen == [[32 + 128, 32]]


def test_what_lies_between_and_is_nobodys_padding_is_not_touched() -> None:
    buffer, gradient = torch.ones(96), torch.ones(96)
    for begin, foreign in ((5, slice(5, 9)), (32, slice(32, 40))):
        buffer.fill_(1.0)
        shards = Shards(shapes={"a.weight": (5, 1), "b.weight": (32, 1)})
        shards.parameters = {"a.weight": nn.Parameter(buffer[:5].view(5, 1)), "b.weight": nn.Parameter(buffer[64:].view(32, 1))}
        if begin == 5:
            shards.parameters["b.weight"] = nn.Parameter(buffer[32:64].view(32, 1))
        optimizer = built(AdamWConfig(lr=0.1), shards)
        for parameter in shards.parameters.values():
            part = gradient[parameter.storage_offset() :][: parameter.numel()]
            parameter.grad = part.view_as(parameter)
        optimizer.step(1.0)
        assert torch.equal(buffer[foreign], torch.ones(foreign.stop - foreign.start))
        assert not buffer[:5].eq(1).any() and not shards.parameters["b.weight"].eq(1).any()


@pytest.mark.parametrize("whose", ["another rule's", "frozen"])
def test_zeros_that_are_a_parameter_are_not_taken_for_padding(whose: str) -> None:
    buffer, gradient = torch.zeros(96), torch.zeros(96)
    places = {"a.weight": (0, 5), "b.bias": (5, 4), "c.weight": (32, 32)}
    shards = Shards(shapes={name: (length, 1) if "weight" in name else (length,) for name, (_, length) in places.items()})
    for name, (begin, length) in places.items():
        shards.parameters[name] = nn.Parameter(buffer[begin : begin + length])
    if whose == "frozen":
        shards.table["b.bias"].trainable = False
        shards.parameters.pop("b.bias")
    optimizer = built(AdamWConfig(), shards)
    buffer[32:] = 1.0
    assert [len(run) for runs in optimizer._elementwise._runs.values() for run in runs] == [1, 1, 1][: len(shards.parameters)]
    gradient[5:9] = 1.0  # what lies there by chance
    for name, parameter in shards.parameters.items():
        parameter.grad = gradient[places[name][0] :][: places[name][1]]
    optimizer.step(1.0)
    assert buffer[5:9].any() == (whose != "frozen")


def test_gradients_of_neighbouring_storages_are_not_taken_for_one() -> None:
    """Two tensors may be neighbours in memory by chance; views of one storage are told from them by its size."""
    shards = Shards(shapes={"a.weight": (32, 1), "b.weight": (32, 1)})
    optimizer = built(AdamWConfig(), shards)
    (piece,) = optimizer._elementwise._make(list(optimizer._elementwise.members.values())).work[0][1]
    memory = torch.zeros(64)
    inside = [memory[:32], memory[32:]]
    assert piece[0].gradient(inside).numel() == 64
    import ctypes

    alone = [torch.frombuffer((ctypes.c_float * 32).from_address(memory.data_ptr() + 128 * i), dtype=torch.float32) for i in range(2)]
    assert alone[1].data_ptr() == alone[0].data_ptr() + 128 and piece[0].gradient(alone) is None
    assert piece[0].gradient([memory[:32], memory[:32]]) is None


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_padding_stays_zero_and_runs_change_nothing(config: Any) -> None:
    together, apart = Shards(), Shards(flat=False)
    run(config, together)
    run(config, apart)
    close(together, apart)
    held = torch.zeros_like(together.buffer, dtype=torch.bool)
    for name in SHAPES:
        together.part(held, name).fill_(True)
    assert not together.buffer[~held].any()


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_disjoint_names_that_cover_all_are_one_step(config: Any) -> None:
    whole, parted = Shards(), Shards()
    run(config, whole)
    optimizer, names = built(config, parted), list(SHAPES)
    for step in range(3):
        parted.differentiate(step)
        optimizer.step(1.0, names=names[2:6])
        optimizer.step(1.0, names=[names[0], names[8], "layers.9.absent"])
        optimizer.step(1.0, names=frozenset(names[1:2] + names[6:8]))
    close(whole, parted)


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_a_factor_on_the_device_is_the_number(config: Any) -> None:
    number, tensor = Shards(), Shards()
    for shards, factor in ((number, 0.5), (tensor, torch.tensor(0.5))):
        optimizer = built(config, shards)
        for step in range(3):
            shards.differentiate(step)
            optimizer.step(factor)
    close(number, tensor)


def test_what_had_no_gradient_is_counted_apart_from_its_neighbours() -> None:
    """Bias correction is by a parameter's own number of updates, although its neighbours are updated together with it later."""
    shards, alone = Shards(), Shards(flat=False)
    skipped = "layers.0.wo.weight"
    optimizer = built(AdamWConfig(lr=0.01), shards)
    reference = {name: nn.Parameter(p.detach().clone()) for name, p in alone.parameters.items()}
    theirs = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 if len(SHAPES[name]) >= 2 else 0.0} for name, p in reference.items()],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for step in range(5):
        without = [skipped] if step in (1, 3) else []
        shards.differentiate(step, without)
        for name, parameter in reference.items():
            gradient = shards.parameters[name].grad
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step(1.0)
        theirs.step()
    assert optimizer.slots()[skipped]["step"] == 3 and optimizer.slots()["layers.0.up.weight"]["step"] == 5
    for name, parameter in reference.items():
        assert torch.allclose(shards.parameters[name], parameter, atol=1e-6), name


def test_loaded_counts_are_noticed() -> None:
    """A checkpoint copies into the slots; what was counted equally before need not be afterwards."""
    saved, resumed = Shards(), Shards()
    first = built(AdamWConfig(lr=0.01), saved)
    for step in range(4):
        saved.differentiate(step, ["layers.0.up.weight"] if step < 2 else [])
        first.step(1.0)
    second = run(AdamWConfig(lr=0.01), resumed, 1)
    with torch.no_grad():
        for name, slots in first.slots().items():
            resumed.parameters[name].copy_(saved.parameters[name])
            for slot, tensor in slots.items():
                second.slots()[name][slot].copy_(tensor)
    for shards, optimizer in ((saved, first), (resumed, second)):
        shards.differentiate(9)
        optimizer.step(1.0)
    for name in SHAPES:
        assert torch.equal(saved.parameters[name], resumed.parameters[name]), name
    assert second.slots()["layers.0.up.weight"]["step"] == 3


# ---------------------------------------------------------------- narrow state and split masters


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_bfloat16_state_is_rounded_once_per_step(config: Any) -> None:
    import chz

    wide, narrow = Shards(), Shards()
    run(config, wide)
    optimizer = run(chz.replace(config, state_dtype="bfloat16"), narrow)
    for name, slots in optimizer.slots().items():
        assert {tensor.dtype for slot, tensor in slots.items() if slot != "step"} == {torch.bfloat16}, name
    for (name, one), other in zip(wide.masters().items(), narrow.masters().values(), strict=True):
        if config.lr and not isinstance(config, LionConfig):  # a sign may turn
            assert torch.allclose(one, other, atol=0.004), name
        assert not torch.equal(one, other) or isinstance(config, LionConfig), name


def test_narrow_state_is_the_wide_update_rounded_to_nearest() -> None:
    value, gradient = torch.randn(1000), torch.randn(1000)
    mean, square = torch.randn(1000).bfloat16(), torch.rand(1000).bfloat16()
    wide = [value.clone(), mean.float(), square.float()]
    updates.adamw_update(value, None, mean, square, gradient, torch.tensor(3.0), 0.01, (0.9, 0.95), 1e-8, 0.1)
    updates.adam_lists([wide[0]], [gradient], [wide[1]], [wide[2]], [torch.tensor(3.0)], 0.01, (0.9, 0.95), 1e-8, 0.1)
    assert torch.equal(value, wide[0]) and torch.equal(mean, wide[1].bfloat16()) and torch.equal(square, wide[2].bfloat16())


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_split_masters_are_updated_as_float32(config: Any, flat: bool) -> None:
    whole, halves = Shards(flat=flat), Shards(flat=flat, split=True)
    run(config, whole)
    run(config, halves)
    for (name, one), other in zip(whole.masters().items(), halves.masters().values(), strict=True):
        # An exact tie moves by one unit in the last place at each split.
        assert torch.allclose(one, other, rtol=3e-6, atol=1e-7), name
    for name, parameter in halves.parameters.items():
        assert torch.equal(parameter.detach(), join_master(parameter.detach(), halves.part(halves.low, name)).bfloat16()), name


def test_chunks_of_an_update_are_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = Shards(split=True), Shards(split=True)
    run(AdamWConfig(), one)
    monkeypatch.setattr(updates, "CHUNK", 7)
    run(AdamWConfig(), many)
    assert torch.equal(one.high, many.high) and torch.equal(one.low, many.low)


# ---------------------------------------------------------------- kernels


PLUGIN = """
from intarsia.contracts import KernelEntry
from intarsia.hookspecs import hookimpl
INTARSIA_API = 1
@hookimpl(optionalhook=True)
def offer_optimizer_kernels():
    common = dict(op="adamw_update", target="acme_update:update", doc="Counts its calls.", priority=1)
    return [KernelEntry(name="acme", **common), KernelEntry(name="far", needs=("no-such-device",), **{**common, "priority": 9})]
"""
KERNEL = """
from intarsia_optimizers.updates import adamw_update
calls = []
def update(*arguments):
    calls.append(arguments)
    adamw_update(*arguments)
update.supports = lambda *arguments: "too small" if arguments[0].numel() < 9 else None
"""


@pytest.fixture
def kernel_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "acme_plugin.py").write_text(PLUGIN)
    (tmp_path / "acme_update.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [
        plugins.Candidate("acme", "1.0", "kernels", "acme_plugin"),
        plugins.Candidate("intarsia-optimizers", "1.0", "rules", "intarsia_optimizers.plugin:rules"),
    ]
    loaded = plugins.load(entry_points=found)
    monkeypatch.setattr(kernels, "current", lambda: loaded)
    yield __import__("acme_update")
    sys.modules.pop("acme_update"), sys.modules.pop("acme_plugin")


def test_a_kernel_takes_the_update_where_torchs_cannot(kernel_plugin: Any) -> None:
    reference, shards = Shards(split=True), Shards(split=True)
    run(AdamWConfig(implementation="foreach"), reference)
    run(AdamWConfig(), shards)
    # Split masters only, and not the norms, which it says it cannot take.
    assert {arguments[1].dtype for arguments in kernel_plugin.calls} == {torch.int16} and len(kernel_plugin.calls) == 6
    close(reference, shards)
    kernel_plugin.calls.clear()
    run(AdamWConfig(), Shards())
    assert not kernel_plugin.calls
    run(AdamWConfig(implementation="acme"), Shards())
    assert len(kernel_plugin.calls) == 6
    with pytest.raises(UsageError, match=r"kernel acme:far for adamw_update cannot be used: this machine lacks no-such-device"):
        built(AdamWConfig(implementation="far"), Shards())
    with pytest.raises(UsageError, match=r"implementation 'acne' is unknown.*acme"):
        built(AdamWConfig(implementation="acne"), Shards())


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (AdamWConfig(lr=-1.0), "optimizer.lr is -1"),
        (AdamWConfig(betas=(0.9, 1.0)), "optimizer.betas is 1"),
        (AdamWConfig(implementation="fast"), "implementation 'fast' is unknown"),
        (AdamWConfig(state_dtype="bf16"), "state_dtype 'bf16' is unknown.*bfloat16"),
        (AdamConfig(l2=0.1, weight_decay=0.1), "optimizer.l2 is 0.1 and optimizer.weight_decay is 0.1.*Set one"),
        (LionConfig(betas=(-0.1, 0.9)), "optimizer.betas is -0.1"),
        (SGDConfig(momentum=1.0), "optimizer.momentum is 1"),
        (SGDConfig(implementation="fusd"), "optimizer.implementation 'fusd' is unknown.*fused"),
        (SGDConfig(nesterov=True, momentum=0.0), "optimizer.nesterov needs momentum"),
    ],
)
def test_settings_out_of_range_are_refused(config: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        built(config, Shards())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "Parameter group 'odd': lr is -1"),
        ({"learning_rate": 1.0}, "Parameter group 'odd' sets 'learning_rate', which is no field of AdamWConfig"),
        ({"state_dtype": "bfloat16"}, "Parameter group 'odd' sets 'state_dtype', which holds for all groups"),
        ({"lr": "fast"}, "Parameter group 'odd'"),
    ],
)
def test_options_of_a_group_that_cannot_be_are_refused(options: dict[str, Any], text: str) -> None:
    shards = Shards()
    with pytest.raises(UsageError, match=text):
        built(AdamWConfig(), shards, [OptimizerGroup("odd", shards.parameters, options)])


def test_parts_that_do_not_fit_their_layout_are_told_by_name() -> None:
    shards = Shards()
    shards.parameters["layers.0.wo.weight"] = nn.Parameter(torch.zeros(31))
    with pytest.raises(PluginError, match=r"'layers.0.wo.weight' has 31 elements, but its layout gives this rank 32 of \[8, 4\]"):
        built(AdamWConfig(), shards)
    shards.parameters["layers.0.wo.weight"] = nn.Parameter(torch.zeros(4, 8).T)
    with pytest.raises(PluginError, match=r"'layers.0.wo.weight' is not contiguous"):
        built(AdamWConfig(), shards)
    halves = Shards(split=True)
    halves.table["layers.0.up.weight"].low = torch.zeros(5, dtype=torch.int16)
    with pytest.raises(PluginError, match=r"split master of parameter 'layers.0.up.weight'"):
        built(AdamWConfig(), halves)


@pytest.mark.parametrize("config", ALL, ids=IDS)
def test_a_step_reads_no_value_on_the_host(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it does not wait for the device, and can be captured."""
    shards = Shards()
    optimizer = run(config, shards, 1)
    assert optimizer.updates_split_masters

    def read(*arguments: Any) -> Any:
        raise AssertionError("a step reads a tensor's value")

    for method in ("item", "tolist", "__bool__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, method, read)
    shards.differentiate(1)
    optimizer.step(torch.full((), 0.5))
