"""Measure the house: core's statements, sizes of files and functions, import circles, forbidden imports. Exit 1 when a limit is broken.

Run: python tools/house.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE_STATEMENTS, FILE_LINES, FUNCTION_LINES = 6000, 600, 80
SOURCES = ("core", "plugins", "kernels", "integrations", "tools", "benchmarks", "examples")


def python_files() -> list[Path]:
    """All first-party Python files, tests left out."""
    hidden = {".venv", ".nox", "__pycache__", "build", "dist"}
    return sorted(path for top in SOURCES for path in (ROOT / top).rglob("*.py") if not hidden & set(path.parts))


def module_name(path: Path) -> str:
    """The dotted name under which a file is imported: from the outermost folder that is a package."""
    parts = [path.stem] if path.stem != "__init__" else []
    folder = path.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts)


def statements(tree: ast.Module) -> int:
    """Statements on the syntax tree; docstrings of modules, classes and functions are free."""
    homes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = list(ast.walk(tree))
    docstrings = sum(isinstance(node, homes) and ast.get_docstring(node, clean=False) is not None for node in nodes)
    return sum(isinstance(node, ast.stmt) for node in nodes) - docstrings


def imports(tree: ast.Module, name: str, is_package: bool) -> Iterator[str]:
    """Modules imported when the module is (functions and TYPE_CHECKING blocks left out)."""

    def visit(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    package = name.split(".") if is_package else name.split(".")[:-1]
                    base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If):
                if "TYPE_CHECKING" not in ast.unparse(node.test):
                    yield from visit(node.body)
                yield from visit(node.orelse)
            elif isinstance(node, ast.Try):
                yield from visit(node.body)

    yield from visit(tree.body)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan, iterative by recursion limit: the graph is small)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def connect(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                connect(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = []
            while True:
                component.append(stack.pop())
                if component[-1] == node:
                    break
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            connect(node)
    return found


def main() -> int:
    """Print the figures; say each broken limit."""
    problems: list[str] = []
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in python_files()}
    names = {module_name(path): path for path in trees}
    graph: dict[str, set[str]] = {}
    core_total = 0
    longest_file, longest_function = (0, ""), (0, "")
    for path, tree in trees.items():
        where = path.relative_to(ROOT).as_posix()
        name = module_name(path)
        lines = path.read_text(encoding="utf-8").count("\n")
        longest_file = max(longest_file, (lines, where))
        if lines > FILE_LINES:
            problems.append(f"{where} has {lines} lines; {FILE_LINES} are allowed.")
        if where.startswith("core/"):
            core_total += statements(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                longest_function = max(longest_function, (size, f"{where}:{node.name}"))
                if size > FUNCTION_LINES:
                    problems.append(f"{where}:{node.lineno} {node.name} has {size} lines; {FUNCTION_LINES} are allowed.")
        wanted = set(imports(tree, name, path.stem == "__init__"))
        graph[name] = {other for other in wanted if other in names and other != name and not name.startswith(other + ".")}
        if where.startswith("core/"):
            problems += [f"{where} imports {other}: core imports no plugin." for other in sorted(wanted) if other.startswith("intarsia_")]
    problems += [f"import circle: {' <-> '.join(circle)}" for circle in circles(graph)]
    if core_total >= CORE_STATEMENTS:
        problems.append(f"core has {core_total} statements; fewer than {CORE_STATEMENTS} are allowed.")
    print(f"core: {core_total} statements (limit {CORE_STATEMENTS}); {len(trees)} files in all")
    print(f"longest file: {longest_file[1]} ({longest_file[0]} lines, limit {FILE_LINES})")
    print(f"longest function: {longest_function[1]} ({longest_function[0]} lines, limit {FUNCTION_LINES})")
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
