"""Generated reference pages, as a hook of mkdocs: every core hook, every command, every recipe field, every first-party entry.

The pages are made from the code at build time and never written into the repository. `pages()` is also what the tests read.
"""

from __future__ import annotations

import argparse
import ast
import inspect
from typing import Any


def hooks_page() -> str:
    """Every spec of `intarsia.hookspecs` with its exact signature and docstring, from the source text (names under TYPE_CHECKING stay names)."""
    from intarsia import hookspecs

    tree = ast.parse(inspect.getsource(hookspecs))
    parts = ["# Hooks\n\nGenerated from `intarsia.hookspecs`. Offers return entries; participants may end a run; observers only look.\n"]
    for sort in ("declaration", "offer", "participant", "observer"):
        parts.append(f"\n## {sort.capitalize()}s\n")
        for node in tree.body:
            function = getattr(hookspecs, getattr(node, "name", ""), None)
            facts = getattr(function, "spec_facts", None)
            if not isinstance(node, ast.FunctionDef) or facts is None or facts.sort != sort:
                continue
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            parts.append(f"\n### {node.name}\n\n```python\n{node.name}({ast.unparse(node.args)}){returns}\n```\n")
            if facts.kind:
                parts.append(f"\nKind: `{facts.kind}`" + (f"; config base: `{facts.base}`" if facts.base else "") + ".\n")
            parts.append(f"\n{inspect.cleandoc(ast.get_docstring(node) or '')}\n")
    return "".join(parts)


def commands_page() -> str:
    """Every command with its own help text."""
    from intarsia import plugins

    loaded = plugins.current()
    parts = ["# Commands\n\nGenerated from the installed commands; `intarsia COMMAND --help` prints the same.\n"]
    for entry in sorted(loaded.registry("command").entries(), key=lambda entry: entry.name):
        command: Any = loaded.target(entry)
        command = command() if isinstance(command, type) else command
        parser = argparse.ArgumentParser(
            prog=f"intarsia {entry.name}", description=entry.doc, formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100)
        )
        command.add_arguments(parser)
        parts.append(f"\n## {entry.name}\n\n{entry.doc}\n\n```text\n{parser.format_help()}```\n")
    return "".join(parts)


def fields_page() -> str:
    """Every field of the Recipe and of the nodes beneath it."""
    from intarsia_console import reference

    return (
        "# Recipe fields\n\nGenerated from the typed recipe. A path is what the command line takes (`train.steps=200`).\n\n"
        + reference.markdown()
    )


def entries_page() -> str:
    """Every entry of every kind, with its settings."""
    from intarsia import plugins
    from intarsia_console import reference

    loaded = plugins.current()
    parts = [
        "# Entries\n\nWhat the first-party distributions offer. Choose by name: `optimizer=muon`, or in full `optimizer=intarsia-optimizers:muon`.\n"
    ]
    for kind in loaded.kinds():
        entries = loaded.registry(kind).entries()
        if not entries:
            continue
        parts.append(f"\n## {kind}\n")
        for entry in entries:
            parts.append(f"\n### {entry.full_name}\n\n{entry.doc}\n")
            if entry.config:
                parts.append("\n" + reference.table(loaded.config_class(entry)) + "\n")
    return "".join(parts)


def pages() -> dict[str, str]:
    """Generated pages by path below docs/."""
    return {
        "reference/hooks.md": hooks_page(),
        "reference/commands.md": commands_page(),
        "reference/recipe-fields.md": fields_page(),
        "reference/entries.md": entries_page(),
    }


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
