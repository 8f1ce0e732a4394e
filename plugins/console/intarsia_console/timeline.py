"""A `timeline` event in words: where a step's time went, bucket by bucket. Torch-free.

`print("\\n".join(lines(found.facts())))` shows what `intarsia_flexshard.timeline` has measured in a loop of one's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COLUMNS = ("bucket", "gathers", "gather", "wait", "compute", "reductions", "reduce", "wait", "exposed", "gathered", "reduced")
COUNTS = ("gathers", "reductions")
FIELDS = (
    *("gathers", "gather_ms", "wait_ms", "compute_ms", "reductions", "reduce_ms", "wait_sum_ms", "exposed_ms"),
    *("gathered_bytes", "reduced_bytes"),
)
# Tables longer than this show the buckets that were waited for the longest, and the rest as one line.
LONGEST = 24


def lines(event: Mapping[str, Any], longest: int = LONGEST) -> list[str]:
    """The table of one step."""
    step = event["step_ms"] or 1.0
    parts = ", ".join(
        f"{name} {event[f'{name}_ms']:.2f} ({event[f'{name}_ms'] / step:.1%})" for name in ("compute", "exposed", "update", "rest")
    )
    rows = list(_rows(event["buckets"], longest))
    widths = [max(len(row[column]) for row in (COLUMNS, *rows)) for column in range(len(COLUMNS))]
    table = [
        "  ".join(text.rjust(width) if column else text.ljust(width) for column, (text, width) in enumerate(zip(row, widths, strict=True)))
        for row in (COLUMNS, *rows)
    ]
    return [f"{event['step_ms']:.2f} ms by the {event['clock']}'s clock: {parts}", *(line.rstrip() for line in table)]


def _rows(buckets: Sequence[Mapping[str, Any]], longest: int) -> Iterator[list[str]]:
    kept = sorted(range(len(buckets)), key=lambda index: -buckets[index]["exposed_ms"])[
        : longest if len(buckets) > longest else len(buckets)
    ]
    for index in sorted(kept):
        yield _row(str(buckets[index]["bucket"]), buckets[index])
    others = [bucket for index, bucket in enumerate(buckets) if index not in kept]
    if others:
        yield _row(f"{len(others)} more", _sum(others))
    yield _row("together", _sum(buckets))


def _sum(buckets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {field: sum(bucket[field] for bucket in buckets) for field in FIELDS}


def _row(name: str, values: Mapping[str, Any]) -> list[str]:
    return [name, *(_text(field, values[field]) for field in FIELDS)]


def _text(field: str, value: float) -> str:
    if field in COUNTS:
        return str(value)
    return f"{value:.2f}" if field.endswith("_ms") else f"{value / 2**20:.2f} MiB"
