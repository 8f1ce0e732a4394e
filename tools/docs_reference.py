"""Generated reference pages, as a hook of mkdocs: every core hook, every command, every recipe field, every first-party entry.

The pages are made from the code at build time and never written into the repository. `pages()` is also what the tests read.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from types import ModuleType
from typing import Any

SORTS = {
    "declaration": "Called while plugins are loaded.",
    "offer": "",  # hookspecs.py says it in a comment for all of them
    "participant": "Called on every rank, in declared order. An exception ends the run and names the plugin.",
    "observer": "An exception switches the implementation off and is reported once; the run goes on.",
}


def hooks_page() -> str:
    """Every spec of core and of the plugins that declare further ones, with its exact signature and docstring."""
    from intarsia import hookspecs, plugins

    text = ["# Hooks\n\nGenerated from `intarsia.hookspecs`. Offers return entries; participants may end a run; observers only look.\n"]
    text += module_hooks(hookspecs)
    declared = {spec.function.__module__: record.candidate for record in plugins.current().records for spec in record.specs.values()}
    for name, candidate in sorted(declared.items()):
        text.append(f"\n# Hooks of {candidate.distribution}\n\nDeclared in `{name}`; implement them with `@hookimpl(optionalhook=True)`.\n")
        text += module_hooks(importlib.import_module(name), f" of {candidate.distribution}")
    return "".join(text)


def module_hooks(module: ModuleType, whose: str = "") -> list[str]:
    """The specs of one module by sort, from its source text: names under TYPE_CHECKING stay names. `whose` tells headings of several modules apart."""
    source = inspect.getsource(module)
    said = " ".join(
        line.removeprefix("# ") for line in "".join(re.findall(r"^# (All: .*\n(?:# .*\n)*)", source, re.MULTILINE)[:1]).splitlines()
    )
    parts = []
    for sort, sentence in SORTS.items():
        found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and _sort(module, node.name) == sort]
        if found:
            parts.append(f"\n## {sort.capitalize()}s{whose}\n\n{sentence or said or 'Registered and checked as those of core are.'}\n")
        for node in found:
            facts = getattr(module, node.name).spec_facts
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            parts.append(f"\n### {node.name}\n\n```python\n{node.name}({ast.unparse(node.args)}){returns}\n```\n")
            if facts.kind:
                parts.append(f"\nKind: `{facts.kind}`" + (f"; config base: `{facts.base}`" if facts.base else "") + ".\n")
            parts.append(f"\n{inspect.cleandoc(ast.get_docstring(node) or '')}\n")
    return parts


def _sort(module: ModuleType, name: str) -> str | None:
    facts = getattr(getattr(module, name, None), "spec_facts", None)
    return None if facts is None else facts.sort


def commands_page() -> str:
    """Every command with its own help text."""
    from intarsia import plugins

    loaded = plugins.current()
    parts = ["# Commands\n\nGenerated from the installed commands; `intarsia COMMAND --help` prints the same.\n"]
    for entry in sorted(loaded.registry("command").entries(), key=lambda entry: entry.name):
        command: Any = loaded.target(entry)
        command = command() if isinstance(command, type) else command
        parser = argparse.ArgumentParser(prog=f"intarsia {entry.name}", description=entry.doc)
        command.add_arguments(parser)
        parts.append(f"\n## {entry.name}\n\n{entry.doc}\n\n```text\n{_help(parser)}```\n")
        for name, action in actions(parser).items():
            parts.append(f"\n### {entry.name} {name}\n\n```text\n{_help(action)}```\n")
    return "".join(parts)


def actions(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's own actions (`checkpoint list`), by name."""
    return {
        name: choice for each in parser._actions if isinstance(each, argparse._SubParsersAction) for name, choice in each.choices.items()
    }


def _help(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)  # type: ignore[assignment]
    return parser.format_help()


def fields_page() -> str:
    """Every field of the Recipe and of the nodes beneath it."""
    from intarsia import config
    from intarsia_console import reference

    text = "# Recipe fields\n\nGenerated from the typed recipe. A path is what the command line takes (`train.steps=200`).\n\n"
    text += reference.markdown()
    text += "\n## What every one of a kind has\n\nWhatever entry is chosen; its further settings stand under [its name](entries.md).\n\n"
    common = {"model": config.ModelConfig, "optimizer": config.OptimizerConfig, "schedule": config.ScheduleConfig}
    return text + "\n".join(reference.table(node, path) for path, node in common.items())


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
