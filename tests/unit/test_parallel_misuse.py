"""Tables, roles and settings that are wrong: told at build, with the row, the module and what would be right; nothing is a traceback."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from intarsia.cli import main
from intarsia.errors import IntarsiaError, PluginError, UsageError
from intarsia.mesh import Mesh
from intarsia.parameters import ParameterTable
from intarsia_llama3.config import llama3
from intarsia_llama3.model import Llama3
from intarsia_llama3.sharding import TABLE
from intarsia_parallel import apply as declared
from intarsia_parallel import table
from intarsia_parallel.checking import explained
from intarsia_parallel.config import DeclaredConfig
from intarsia_parallel.cuts import EvenCut
from intarsia_parallel.experts.config import FixedCapacityConfig
from intarsia_testing.communicator import run_ranks
from torch import nn

CONFIG = llama3(dim=24, layers=2, heads=6, kv_heads=2, head_dim=4, hidden=26, vocab_size=29)
W1 = "layers.*.feed_forward.w1"


@dataclasses.dataclass
class Recipe:
    model: object


def refused(rows: Any) -> str:
    def work(comm: Any) -> None:
        with torch.device("meta"):
            model = Llama3(CONFIG)
        declared.build(DeclaredConfig()).apply(model, ParameterTable.from_model(model), Mesh({"tp": 2}, comm), Recipe(CONFIG), rows)  # type: ignore[arg-type]

    with pytest.raises(IntarsiaError) as caught:
        run_ranks(2, work)
    return str(caught.value)


def with_row(pattern: str, *row: Any) -> tuple[Any, ...]:
    return tuple((pattern, *row) if each[0] == pattern else each for each in TABLE)


@pytest.mark.parametrize(
    "row, told",
    [
        ((W1, "column", {"unit": 0}), "column.unit = 0: it must be finite and at least 1"),
        ((W1, "column", {"unit": 2.5}), "the role 'column' does not take {'unit': 2.5}"),
        (("layers.*.feed_forward.w2", "row", {"unit": -1}), "row.unit = -1"),
        (("layers.*.feed_forward", "region", {"inputs": 0}), "region.inputs = 0"),
        (("layers.*.feed_forward", "replicated", {"inputs": -2}), "replicated.inputs = -2"),
        ((W1, "column", {1: 2}), "a row is (module pattern, role) or (module pattern, role, {setting: value})"),
    ],
)
def test_settings_that_no_role_can_have(row: tuple[Any, ...], told: str) -> None:
    assert told in refused(with_row(*row))


@pytest.mark.parametrize(
    "row, told",
    [
        (("layers.1.feed_forward.w2", "row"), "layers.1.feed_forward.w2 has one role by two rows, 'layers.*.feed_forward.w2' (row) and 'layers.1"),
        (("layers.1.feed_forward.w2", "intarsia-parallel:row"), "has one role by two rows"),
        (("head", "vocab"), "head has one role by two rows"),
        (("layers.*.attention", "region"), "layers.0.attention has roles that both gather, or both sum by two rows"),
        (("layers.*.feed_forward", "replicated"), "layers.0.feed_forward has roles that both gather"),
    ],
)  # fmt: skip
def test_a_module_is_not_wrapped_twice(row: tuple[Any, ...], told: str) -> None:
    assert told in refused([*TABLE, row])


def fails(config: Any) -> Any:
    raise ValueError("no such size")


@pytest.mark.parametrize(
    "rows, told",
    [
        (fails, "The sharding table of Llama3 is a function that failed on the model's config: ValueError: no such size ("),
        (lambda: TABLE, "is a function that failed on the model's config: TypeError"),
        (lambda config: None, "is what a function gave, a NoneType; it is a tuple or list of rows"),
        ((row for row in TABLE), "is a generator; it is a tuple or list of rows"),
        (5, "is a int; it is a tuple or list"),
        ("norm", "is a str; it is a tuple or list"),
    ],
)
def test_a_table_that_is_none(rows: Any, told: str) -> None:
    assert told in refused(rows)


class Right:
    def check(self, name: str, module: nn.Module, sizes: Any) -> None:
        pass

    def cut(self, name: str, module: nn.Module, sizes: Any) -> Any:
        return {"weight": ("tp", EvenCut(0))}

    def apply(self, name: str, module: nn.Module, groups: Any) -> None:
        pass


@pytest.mark.parametrize(
    "method, answer, told",
    [
        ("check", lambda name, module, sizes: 1 // 0, "norm: the role acme (Right.check) failed: ZeroDivisionError"),
        ("check", lambda name: None, "norm: the role acme (Right.check) failed: TypeError"),
        ("cut", lambda name, module, sizes: None, "norm: the role acme gave None as its cuts; they are parameter name -> (mesh axis, placement)"),
        ("cut", lambda name, module, sizes: {"weight": "tp"}, "norm: the role acme cuts 'weight' by 'tp'; a cut is (mesh axis, placement)"),
        ("cut", lambda name, module, sizes: {"weight": ("tpp", EvenCut(0))}, "over 'tpp', which is no axis that parameters are cut over. Did you mean 'tp'?"),
        ("cut", lambda name, module, sizes: {"weight": ("dp_shard", EvenCut(0))}, "over 'dp_shard', which is no axis that parameters are cut over"),
        ("cut", lambda name, module, sizes: {"wait": ("tp", EvenCut(0))}, "the role acme cuts 'wait', which is no parameter of RMSNorm"),
        ("cut", lambda name, module, sizes: {"weight": ("tp", EvenCut(3))}, "it has no dimension 3"),
        ("apply", lambda name, module, groups: groups("tp").nothing, "norm: the role acme (Right.apply) failed: AttributeError"),
        ("overrules", lambda name, module: 1 // 0, "norm: the role acme (Right.overrules) failed: ZeroDivisionError"),
    ],
)  # fmt: skip
def test_a_role_of_somebody_elses_that_is_broken_is_named(monkeypatch: pytest.MonkeyPatch, method: str, answer: Any, told: str) -> None:
    real = table.build_role

    def build(name: str, settings: dict[str, Any]) -> Any:
        if name != "acme":
            return real(name, settings)
        role = Right()
        setattr(role, method, answer)
        return role

    monkeypatch.setattr(table, "build_role", build)
    assert told in refused(with_row("norm", "acme"))


def test_a_setting_that_names_a_parameter_of_no_module() -> None:
    rows = with_row("layers.*.attention", "attention_heads", {"per_head": ("nothing.here",)})

    def work(comm: Any) -> None:
        with torch.device("meta"):
            model = Llama3(CONFIG)
        declared.build(DeclaredConfig()).apply(model, ParameterTable.from_model(model), Mesh({"tp": 2}, comm), Recipe(CONFIG), rows)  # type: ignore[arg-type]

    run_ranks(2, work)  # `per_head` names parameters where they exist.


def test_a_step_that_fails_on_the_mesh_only_names_the_module_and_its_roles() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w1(x) + torch.ones(3)

    model = nn.Sequential(Broken())
    with pytest.raises(PluginError) as caught, explained(model, {"0.w1.weight": "column", "1.weight": "row"}):
        model(torch.ones(1, 2))
    assert "fails on the mesh, in the forward of 0: RuntimeError" in str(
        caught.value
    ) and "Look at the roles there: w1.weight (column)." in str(caught.value)
    with explained(model[0].w1, {}):
        assert model[0].w1(torch.ones(1, 2)).shape == (1, 2)
    assert not model[0]._forward_hooks and not model[0].w1._forward_pre_hooks


@pytest.mark.parametrize(
    "words, told",
    [
        (("--mesh", "tp=2,tp=3"), "names tp twice, as 2 and 3"),
        (("--mesh", "dp_shard=1", "--tolerance", "nan"), "--tolerance is nan"),
        (("--mesh", "dp_shard=1", "--tolerance", "-1"), "--tolerance is -1"),
        (("--mesh", "dp_shard=1", "--sequence", "1"), "No label counts in 2 micro-batches of 2 rows of 1 tokens"),
    ],
)
def test_a_check_that_would_prove_nothing(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str) -> None:
    assert main(["parallel", "check", "llama3", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_a_capacity_is_a_number(factor: float) -> None:
    with pytest.raises(UsageError, match=r"fixed_capacity.factor = .*: it must be finite and greater than 0"):
        FixedCapacityConfig(factor=factor)
