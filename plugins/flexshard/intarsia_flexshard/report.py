"""A plan in words and as JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from intarsia_flexshard.accounting import BucketBytes
    from intarsia_flexshard.planning import Plan

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# What a rank holds: the field of RankBytes, and how the table calls it.
HELD = (
    ("masters", "masters"),
    ("cast", "masters cast for the gather"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer state"),
    ("accumulated", "accumulated gradients"),
    ("whole", "whole parameters"),
    ("pack", "packed gradients"),
    ("device", "together"),
    ("away", "given back while activations are at their most"),
    ("host", "in the host's memory"),
)
MOVED = (("gather", "gathers"), ("reduce", "reductions"), ("replicas", "sums over replicas"))
COLUMNS = ("bucket", "elements", "placement", "over", "shard", "whole", "gathers", "gathered", "reduced", "most", "padding")


def size_text(size: float) -> str:
    """Bytes with a unit: `1.50 GiB`."""
    for unit in UNITS:
        if size < 1024 or unit == UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("the last unit takes everything")


def count_text(count: int) -> str:
    """Elements with a unit: `8.03 B`."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return str(count)


# ---------------------------------------------------------------- words


def lines(plan: Plan, unfolded: bool = False) -> list[str]:
    """The plan as a table."""
    degrees = " x ".join(f"{axis} {size}" for axis, size in plan.sizes.items() if size > 1 and axis != "ep_shard") or "one process"
    frozen = f", {count_text(plan.elements - plan.trained)} of them frozen" if plan.trained < plan.elements else ""
    batches = plan.settings.micro_batches
    return [
        f"{plan.recipe.name} on {len(plan.ranks)} process{'es' * (len(plan.ranks) > 1)} ({degrees}): {count_text(plan.elements)} parameters{frozen}, "
        f"{len(plan.buckets)} bucket{'s' * (len(plan.buckets) > 1)}, {batches} micro-batch{'es' * (batches > 1)} a step",
        "",
        *_rank_lines(plan),
        f"  Optimizer state: {plan.optimizer}. Activations, and gradients that backward has just made, come on top.",
        "",
        *table(list(_bucket_rows(plan, unfolded)), left=(0, 2, 3)),
        "",
        "Columns: shard: the largest rank's masters. gathers: how often in a step. gathered, reduced: received by the largest receiver in one of them.",
        "most: the largest share of elements, in parts of an even one. padding: what of a gather is no parameter.",
    ]


def _rank_lines(plan: Plan) -> Iterator[str]:
    rows: list[Sequence[str]] = [("Bytes of a rank", "least", "mean", "most", "")]
    for field, words in HELD:
        rows += _spread(plan, field, words)
    rows.append(("Received by a rank in a step", "", "", "", ""))
    for field, words in MOVED:
        rows += _spread(plan, field, words)
    yield from table(rows, left=(0, 4))


def _spread(plan: Plan, field: str, words: str) -> list[Sequence[str]]:
    """The row of one field over all ranks; none where nobody has any of it."""
    sizes = [getattr(rank, field) for rank in plan.ranks]
    if None in sizes:
        return [(f"  {words}", "unknown", "unknown", "unknown", "")]
    if not any(sizes):
        return []
    most = max(sizes)
    where = f"rank {sizes.index(most)}" if min(sizes) < most else ""
    note = " without the optimizer's" if field == "device" and plan.ranks[0].optimizer is None else ""
    return [(f"  {words}{note}", size_text(min(sizes)), size_text(sum(sizes) / len(sizes)), size_text(most), where)]


def _bucket_rows(plan: Plan, unfolded: bool) -> Iterator[Sequence[str]]:
    yield COLUMNS
    rows = [_bucket_row(plan, number) for number in range(len(plan.buckets))]
    while rows:
        equal = 1
        while not unfolded and equal < len(rows) and rows[equal][1:] == rows[0][1:]:
            equal += 1
        name = rows[0][0] if equal == 1 else _span([row[0] for row in rows[:equal]])
        yield (name, *rows[0][1:])
        rows = rows[equal:]


def _span(names: Sequence[str]) -> str:
    """`layers.0-31` for names that count up; else the first name and how many there are."""
    parts = [re.fullmatch(r"(.*?)(\d+)(\D*)", name) for name in names]
    if all(parts):
        found = [part.groups() for part in parts if part]
        begin = int(found[0][1])
        if [(before, int(number), after) for before, number, after in found] == [
            (found[0][0], begin + index, found[0][2]) for index in range(len(names))
        ]:
            return f"{found[0][0]}{begin}-{begin + len(names) - 1}{found[0][2]}"
    return f"{names[0]} ({len(names)} alike)"


def _bucket_row(plan: Plan, number: int) -> tuple[str, ...]:
    bucket = plan.buckets[number]
    axes = "+".join(axis for axis in bucket.spec.axes if plan.sizes[axis] > 1) if bucket.is_cut else ""
    return (
        bucket.spec.name,
        count_text(bucket.elements),
        plan.placements[number],
        axes or "nothing",
        size_text(max(bucket.masters)),
        size_text(bucket.whole) if not bucket.is_alias else "the shard",
        str(plan.gathers[number]),
        size_text(max(bucket.gather)),
        size_text(max(bucket.reduce)),
        f"{bucket.imbalance:.2f}",
        f"{bucket.padding:.1%}",
    )


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Aligned columns, those of `left` to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    found = []
    for row in rows:
        sides = zip(row, widths, strict=True)
        cells = [text.ljust(width) if column in left else text.rjust(width) for column, (text, width) in enumerate(sides)]
        found.append("  ".join(cells).rstrip())
    return found


# ---------------------------------------------------------------- JSON


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain values: everything, for each rank and each bucket. All sizes are bytes; `elements` and `held` are elements."""
    settings = plan.settings
    return {
        "recipe": plan.recipe.name,
        "processes": len(plan.ranks),
        "mesh": dict(plan.sizes),
        "elements": plan.elements,
        "trained_elements": plan.trained,
        "micro_batches": settings.micro_batches,
        "reductions": plan.reductions,
        "master": "split" if settings.is_split else settings.master,
        "optimizer": {"known": settings.slots is not None, "state": plan.optimizer},
        "ranks": [dataclasses.asdict(rank) | {"device": rank.device} for rank in plan.ranks],
        "buckets": [_bucket_json(plan, bucket, number) for number, bucket in enumerate(plan.buckets)],
    }


def _bucket_json(plan: Plan, bucket: BucketBytes, number: int) -> dict[str, Any]:
    spec = bucket.spec
    settings = (
        "axes",
        "replicas",
        "compute",
        "reduce",
        "reshard",
        "keep",
        "offload",
        "reduce_op",
        "divisor",
        "prefetch",
        "payload",
        "modules",
    )
    sizes = (
        "elements",
        "held",
        "masters",
        "low",
        "cast",
        "gradients",
        "slots",
        "accumulated",
        "whole",
        "staged",
        "pack",
        "received",
        "gather",
        "reduce",
    )
    return {
        "name": spec.name,
        "placement": plan.placements[number],
        "members": [info.name for info in spec.infos],
        **{field: _plain(getattr(spec, field)) for field in settings},
        "is_cut": bucket.is_cut,
        "gathers": plan.gathers[number],
        **{f"{field}_bytes" if field not in ("elements", "held") else field: _plain(getattr(bucket, field)) for field in sizes},
        "replicas_bytes": list(bucket.replicas),
        "imbalance": bucket.imbalance,
        "padding": bucket.padding,
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
