"""Every command and every Python block of docs/how-to/recipes.md works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from intarsia.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "recipes.md").read_text("utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(autouse=True)
def _in_a_folder_with_the_example(tmp_path, monkeypatch):
    (example,) = re.findall(r'```python title="my_recipes.py"\n(.*?)```', PAGE, re.DOTALL)
    (tmp_path / "my_recipes.py").write_text(example)
    monkeypatch.chdir(tmp_path)


def test_there_are_commands():
    assert len(COMMANDS) > 12


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_works(line, capsys):
    program, *arguments = shlex.split(line, comments=True)
    assert program == "intarsia"
    assert main(arguments) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_the_python_works():
    block = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1]
    names: dict = {}
    exec(compile(block, "recipes.md", "exec"), names)
    assert names["resolved"].recipe.train.steps == 200
    assert names["resolved"].values["train.steps"].source == "command line"
