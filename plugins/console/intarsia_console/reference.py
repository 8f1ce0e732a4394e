"""Markdown tables of config classes' fields, for reference pages. Torch-free."""

from __future__ import annotations

from intarsia.config import Config, Recipe

from intarsia_console.fields import fields


def table(node: type[Config], path: str = "") -> str:
    """A Markdown table of `fields(node)`."""
    rows = [
        f"| `{row.path}` | `{row.type.replace('|', chr(92) + '|')}` | {_cell(row.default)} | {_escape(row.doc)} |"
        for row in fields(node, path)
    ]
    return "\n".join(["| Field | Type | Default | Meaning |", "| --- | --- | --- | --- |", *rows]) + "\n" if rows else "No settings.\n"


def markdown() -> str:
    """The reference table of the recipe and of every core node beneath it."""
    return table(Recipe)


def _cell(default: str | None) -> str:
    return "required" if default is None else f"`{default.replace('|', chr(92) + '|')}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
