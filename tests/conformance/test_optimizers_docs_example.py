"""The optimizers that the how-to shows keep every promise; the page on Muon names settings that there are, and its commands resolve."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chz
import pytest
from intarsia import plugins
from intarsia.cli import main
from intarsia.config import Config
from intarsia_optimizers.config import MuonConfig
from intarsia_testing import OptimizerConformance
from intarsia_testing import optimizer as kit

DOCS = Path(__file__).parents[2] / "docs" / "how-to"


class Example(OptimizerConformance):
    file: str

    @pytest.fixture(autouse=True)
    def _page(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        (tmp_path / "acme_sign").mkdir()
        for name, code in re.findall(r"```python\n# acme_sign/(\w+\.py)\n(.*?)```", (DOCS / "write-an-optimizer.md").read_text(), re.S):
            (tmp_path / "acme_sign" / name).write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        target = __import__(f"acme_sign.{self.file}", fromlist=["build"]).build
        monkeypatch.setattr(kit, "current", lambda: SimpleNamespace(entry_of=lambda config: None, target=lambda entry: target))
        yield
        for name in [name for name in sys.modules if name.startswith("acme_sign")]:
            sys.modules.pop(name)

    def given_configs(self) -> list[Config]:
        config: Config = __import__("acme_sign.config", fromlist=["SignConfig"]).SignConfig(lr=1e-3)
        return [config]


class TestSign(Example):
    file = "sign"


class TestFast(Example):
    file = "fast"


PAGE = (DOCS / "muon.md").read_text()
COMMANDS = re.findall(r"^ {4,8}(intarsia train .*)$", PAGE, re.M)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_page_on_muon_resolve(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, recipe, *arguments = shlex.split(line)
    if "--processes" in arguments:
        at = arguments.index("--processes")
        del arguments[at : at + 2]
        arguments.insert(0, "sharder=flexshard")
    assert main(["config", recipe, *arguments]) == 0, capsys.readouterr().err


def test_the_page_on_muon_names_settings_that_there_are() -> None:
    fields = {name for row in re.findall(r"^\| (`.*?`) \|", PAGE, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert len(COMMANDS) == 4 and len(fields) > 8 and fields <= set(chz.chz_fields(MuonConfig))
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(compile(block, "muon.md", "exec"), names)
    assert len(names["optimizer"].split) == 3
    assert plugins.current().entry_of(MuonConfig).name == "muon"
