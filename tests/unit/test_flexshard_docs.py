"""What docs/explanation/flexshard.md shows is what the runtime does: the order of a step, the loop of one's own, the settings, the lifecycle."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from intarsia import plugins
from intarsia.comm import FakeCommunicator
from intarsia.config import resolve
from intarsia.mesh import Mesh, check_mesh
from intarsia.parameters import ParameterTable
from intarsia_eager.context import TrainContext
from intarsia_flexshard.config import FlexShardConfig
from intarsia_flexshard.runtime import FlexShardModel

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "flexshard.md").read_text("utf-8")
ROWS, TOKENS = 2, 8


class Recorder:
    """An observer that writes down what begins."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def enter(self, phase: str, name: str) -> None:
        """Write it down."""
        self.lines.append(f"{phase} {name}")

    begin = enter

    def leave(self, phase: str, name: str) -> None:
        """Nothing."""

    end = leave

    def clear(self) -> None:
        """Nothing."""


class Nothing:
    """An optimizer that updates nothing."""

    def step(self, factor: Any, names: Any = None) -> None:
        """Nothing."""


def order_of_a_step() -> list[str]:
    """What the third step of four blocks on two processes does."""
    recipe = resolve("llama3/debug", ["sharder.placement=flat"]).recipe
    with torch.device("meta"):
        model: Any = plugins.current().build(recipe.model)
    comm = FakeCommunicator(0, 2)
    mesh = Mesh(check_mesh(recipe.mesh, 2), comm)
    sharded: Any = plugins.current().build(recipe.sharder).shard(model, ParameterTable.from_model(model), mesh, comm)
    context = TrainContext(torch.arange(TOKENS).expand(ROWS, TOKENS), None, ((TOKENS,),) * ROWS)
    recorder = Recorder()
    for step in range(3):
        sharded.lanes.observer = recorder if step == 2 else None
        model(torch.zeros(ROWS, TOKENS, dtype=torch.int64), context).sum().backward()
        sharded.finish_gradients()
        sharded.update(Nothing(), 1.0)
        sharded.zero_gradients()
    return recorder.lines


def shown(kind: str) -> str:
    """The page's block below the comment with this name."""
    (found,) = re.findall(rf"<!-- {kind} -->\n+```\w*\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


def test_a_step_goes_as_the_page_shows_it() -> None:
    assert [line.split("  ")[0].strip() for line in shown("order").splitlines()] == order_of_a_step()


def test_the_loop_of_ones_own_runs(capsys: Any) -> None:
    exec(compile(shown("loop"), "flexshard.md", "exec"), {"__name__": "loop"})
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step ")]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert any(line.startswith("bucket ") for line in lines) and any(line.startswith("together ") for line in lines)


def cells(heading: str) -> list[str]:
    """What the first column of the table below a heading names."""
    body = re.split(r"^##", PAGE.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)", row)]


def test_every_setting_is_in_the_table() -> None:
    settings = {name for name in FlexShardConfig.__chz_fields__ if not name.startswith("_")}
    assert set(cells("Settings, and what they cost")) == settings


def test_every_call_of_the_lifecycle_is_in_the_table() -> None:
    calls = {name for name, value in inspect.getmembers(FlexShardModel, callable) if not name.startswith("_")}
    assert set(cells("The lifecycle")) == calls
