"""`intarsia config`: the tree, JSON, differences, the list; without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import config_fakes as fakes
from intarsia import plugins
from intarsia.cli import main
from intarsia.config import resolve
from intarsia_console import reference
from intarsia_console.fields import fields

PLUGINS = fakes.loaded(fakes.CONSOLE)
SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture(autouse=True)
def _fakes_only():
    plugins.use(PLUGINS)
    yield
    plugins.use(None)


@pytest.fixture
def intarsia(capsys):
    def call(*arguments):
        code = main(["config", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_the_tree_shows_values_and_who_set_them_with_equal_layers_folded(intarsia):
    code, out, _ = intarsia("fake/small", "model.layers.2.dim=4", "--with", "longer", "train.seed=7")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["seed", "7", "command", "line"] in rows
    assert ["steps", "20", "transform", "longer"] in rows
    assert ["dim", "4", "command", "line"] in rows
    assert "    0-1" in out
    assert "    2" in out
    assert out.count("heads") == 2
    assert len({line.index("default") for line in out.splitlines() if line.endswith("  default")}) == 1  # aligned
    assert "\033" not in out
    code, out, _ = intarsia("fake/small", "--all")
    assert out.count("heads") == 3


def test_dropped_values_are_shown(intarsia):
    _, out, _ = intarsia("fake/small", "optimizer=matrix")
    assert "Dropped" in out
    assert "optimizer.lr" in out
    assert "optimizer.betas" not in out  # a default is no loss


def test_json_is_resolved_json(intarsia):
    _, out, _ = intarsia("fake/small", "train.clip_norm_type=inf", "--json")
    assert json.loads(out) == resolve("fake/small", ["train.clip_norm_type=inf"], plugins=PLUGINS).resolved_json()


def test_diff_against_a_recipe_and_a_run_directory(intarsia, tmp_path):
    (tmp_path / "recipe.json").write_text(
        json.dumps(resolve("fake/small", ["...window=3", "optimizer=matrix"], plugins=PLUGINS).recipe_json())
    )
    code, out, _ = intarsia("fake/small", "--diff", str(tmp_path))
    assert code == 0
    assert "model.layers.0-2.attention.window (3 places)" in out
    assert "optimizer.momentum" in out
    assert "not there" in out
    _, out, _ = intarsia("fake/small", "--diff", "fake/small")
    assert "are equal" in out
    _, out, _ = intarsia("fake/small", "train.steps=11", "--diff", "fake/small", "--json")
    assert json.loads(out) == [
        {"path": "train.steps", "left": {"value": 11, "source": "command line"}, "right": {"value": 10, "source": "recipe fake/small"}}
    ]


def test_diff_of_models_of_other_depth_names_the_layers_and_says_nothing_of_what_is_in_them(tmp_path):
    """Each setting of sixteen layers that are not there stood in a line of its own, under the same name as the layers that are."""
    command = Path(sys.executable).with_name("intarsia")
    out = subprocess.run([command, "config", "llama3/8b", "--diff", "llama3/1b"], capture_output=True, text=True, check=True).stdout
    assert "model.layers.0-15.feed_forward.hidden (16 places)" in out and "model.layers.16-31 (16 places)" in out
    assert out.count("not there") == 1


def test_without_a_recipe_all_are_listed(intarsia):
    _, out, _ = intarsia()
    assert "fake/small" in out
    assert "longer" in out
    _, out, _ = intarsia("--json")
    assert {"name": "fake/small", "owner": "fake-family", "doc": "Fake fake/small."} in json.loads(out)["recipes"]


def test_mistakes_are_usage_errors_without_a_traceback(intarsia):
    code, out, err = intarsia("fake/smal")
    assert (code, out) == (2, "")
    assert "Did you mean 'fake/small'" in err
    code, _, err = intarsia("fake/small", "optimzer.lr=1")
    assert code == 2
    assert "optimizer.lr" in err
    assert "Traceback" not in err


def test_a_terminal_shows_what_was_changed_in_bold(intarsia, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    _, out, _ = intarsia("fake/small", "train.seed=7")
    bold = [line for line in out.splitlines() if line.startswith("\033[1m")]
    assert len(bold) == 1
    assert "seed" in bold[0]


def test_it_imports_no_torch():
    script = f"""
import sys; sys.path.insert(0, {SUPPORT!r})
import config_fakes
from intarsia import plugins
from intarsia.cli import main
plugins.use(config_fakes.loaded(config_fakes.CONSOLE))
code = main(["config", "fake/large"])
assert code == 0
assert not {{"torch", "numpy"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "0-61" in done.stdout


def test_the_reference_lists_every_field_of_the_recipe():
    rows = {row.path: row for row in fields()}
    assert rows["train.steps"].default == "100"
    assert rows["model"].default is None
    assert rows["data.mixture.N.weight"].type == "float"
    assert all(row.doc for row in rows.values())
    assert {path.split(".")[0] for path in resolve("fake/small").values} <= {path.split(".")[0] for path in rows}
    assert "| `train.clip_norm` | `float \\| None` | `1.0` |" in reference.markdown()
    assert "| `lr` | `float` | `0.0003` |" in reference.table(fakes.AdamConfig)
    assert reference.table(fakes.NothingConfig) == "No settings.\n"
