"""Every distribution declares what it imports, and ships what an installed copy needs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / line.split()[1] for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("-e")]
FOLDERS += [ROOT / "examples" / name for name in ("kernel", "model", "placement", "recurrence", "storage")]
PROJECTS: dict[Path, dict[str, Any]] = {folder: tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in FOLDERS}

OF_CORE = {"torch", "numpy", "chz", "pluggy"}
"""Core decides these versions, so whoever depends on `intarsia` may import them."""

OTHERWISE_NAMED = {"PIL": "pillow"}
"""Modules whose distributions are called otherwise."""

WITH_TORCH = {"triton"}
"""Comes with CUDA builds of torch, and a kernel that needs it says so."""


def packages_of(folder: Path) -> list[Path]:
    return [init.parent for init in folder.glob("*/__init__.py")]


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement)[0]


def imports_of(package: Path) -> set[str]:
    """Top-level names of the modules that a package imports, wherever in it."""
    found: set[str] = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {package.name}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_imports_are_declared_and_declared_is_imported(folder: Path) -> None:
    first_party = {package.name: PROJECTS[other]["name"] for other in FOLDERS for package in packages_of(other)} | OTHERWISE_NAMED
    project = PROJECTS[folder]
    imported = {first_party.get(module, module) for package in packages_of(folder) for module in imports_of(package)} - {project["name"]}
    needed = {name_of(requirement) for requirement in project["dependencies"]}
    optional = {name_of(each) for group in project.get("optional-dependencies", {}).values() for each in group}
    given = OF_CORE if "intarsia" in needed else set()
    assert imported - needed - optional - given - WITH_TORCH == set(), "imported, but not declared"
    # A dependency on one of our own may be on its entries, which are chosen by name.
    assert needed - imported - set(first_party.values()) == set(), "declared, but not imported"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_pytorch_is_asked_for_alike(folder: Path) -> None:
    found = [each for each in PROJECTS[folder]["dependencies"] if name_of(each) == "torch"]
    assert found in ([], ["torch>=2.11"])
    assert PROJECTS[folder]["requires-python"] == ">=3.11"


def test_a_wheel_of_the_kit_holds_its_templates(tmp_path: Path) -> None:
    folder = ROOT / "plugins" / "testing"
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(tmp_path),
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "intarsia_testing/py.typed" in names
    held = {Path(name).name for name in names if "/templates/" in name}
    assert held == {path.name for path in (folder / "intarsia_testing" / "templates").iterdir()} != set()
