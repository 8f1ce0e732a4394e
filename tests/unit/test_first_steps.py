"""What a newcomer is told who takes a plausible first step that is not the right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from intarsia.cli import main
from intarsia.config import resolve
from intarsia.errors import UsageError
from intarsia_testing.cli_new_plugin import BY_HAND

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


def test_a_run_directory_that_is_taken_as_a_recipe_is_told(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.json").write_text(json.dumps(resolve("llama3/debug", []).recipe_json(), allow_nan=False))
    assert main(["train", str(run), "mesh.tp=3", "mesh.dp_shard=1"]) == UsageError.exit_code
    said = capsys.readouterr().err
    assert "this is a new run" in said and f"intarsia train --resume {run}" in said
    assert main(["train", "--resume", str(run), "mesh.tp=3", "mesh.dp_shard=1"]) == UsageError.exit_code
    assert "this is a new run" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", BY_HAND)
def test_a_kind_without_a_scaffold_has_a_page(kind, tmp_path, capsys) -> None:
    assert main(["new-plugin", kind, "acme-mine", "--dir", str(tmp_path)]) == UsageError.exit_code
    assert BY_HAND[kind] in capsys.readouterr().err and (PAGES / BY_HAND[kind]).is_file()
    assert not list(tmp_path.iterdir())
