"""The table of a parity run: for each family and batch how far what was compared differs at most. Imports nothing heavy: pytest's plugin does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PARITY = "intarsia_parity"
"""The name under which a report carries a measured difference."""


def measured(family: str, batch: str, what: str, error: float, allowed: float, note: str = "") -> dict[str, Any]:
    """What a report carries."""
    return {"family": family, "batch": batch, "what": what, "error": float(error), "allowed": float(allowed), "note": note}


def parity_table(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines of the table: one for each family and batch, a column for each thing that was compared; `!` behind what is more than is allowed. Empty without a measurement."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    worst: dict[tuple[str, str, str], float] = {}
    columns: list[str] = []
    failed = 0
    for each in found:
        row, what, error = (each["family"], each["batch"]), each["what"], each["error"]
        # The same was measured several times: the largest counts.
        if worst.get((*row, what), -1.0) > error:
            continue
        is_wrong = not error <= each["allowed"]
        failed += is_wrong
        worst[*row, what] = error
        columns += [what] if what not in columns else []
        cells = rows.setdefault(row, {})
        cells[what] = f"{error:.1e}{'!' if is_wrong else ''}" + (f" ({each['note']})" if each["note"] else "")
    if not rows:
        return []
    lines = [["family", "batch", *columns]]
    lines += [[*row, *(cells.get(what, "") for what in columns)] for row, cells in rows.items()]
    text = _aligned(lines)
    return [*text, f"{failed} of {len(worst)} measurements are above what is allowed."] if failed else text


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
