"""The figures of `flexshard_gpu.py` and `muon_gpu.py`: every ratio with its bar, from the files of a folder.

    python benchmarks/flexshard_table.py FOLDER            # a Markdown table; exit code 1 if a bar is not met or was not measured
    python benchmarks/flexshard_table.py FOLDER --json     # the same as JSON

A time is the median over all counted steps of all rounds; a step takes as long as it takes the slower rank. A ratio is of two medians of one file, whose
variants ran in turn; beside it stands the range of the ratios of single rounds. The opponent in a time is the faster of its two wrappings, in memory the
best wrapping. Memory counts symmetric memory; of a captured step it is what the allocator holds for it, private pool included.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LEAST_STEPS = 30
GIB = 2**30

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line: `reached` against `bar` (None: no bar, or not measured); lower is better. `note` says what stands behind the figure."""

    section: str
    what: str
    reached: float | None
    bar: float | None = None
    note: str = ""
    problem: str = ""

    @property
    def verdict(self) -> str:
        """met, not met (by how much), not measured, or nothing where there is no bar."""
        if self.reached is None or not math.isfinite(self.reached):
            return "not measured" if self.bar is not None else ""
        if self.bar is None:
            return ""
        if self.reached > self.bar:
            return f"not met by {self.reached - self.bar:.3g}"
        return "met" if not self.problem else f"met, but {self.problem}"


# ---------------------------------------------------------------- reading one variant


def rounds(entry: Record) -> list[list[float]]:
    """Counted step times by round: each step's is that of the slower rank."""
    ranks = list(entry.get("steps_ms", {}).values())
    return [[max(step) for step in zip(*together, strict=True)] for together in zip(*ranks, strict=True)]


def step_ms(entry: Record) -> float | None:
    """Median of all counted steps."""
    values = list(itertools.chain.from_iterable(rounds(entry)))
    return statistics.median(values) if values and "error" not in entry else None


def memory(entry: Record) -> float | None:
    """Bytes at the peak: those that are allocated, and of a graph, which computes in memory of its own, those that the allocator holds for it."""
    captured = entry.get("captured", False)
    held = entry.get("reserved_growth_bytes" if captured else "peak_allocated_bytes")
    return None if held is None or "error" in entry else held + entry.get("symmetric_bytes", 0)


def moved(entry: Record, prefix: str) -> int:
    """Bytes of one step received by collectives whose name begins so."""
    return sum(each["bytes"] for what, each in entry.get("traffic", {}).items() if what.startswith(prefix))


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """None where one of them is missing or nothing can be divided by."""
    return numerator / denominator if numerator is not None and denominator else None


# ---------------------------------------------------------------- rows


def time_row(record: Record, ours: str, others: Sequence[str], bar: float | None, what: str = "") -> Row:
    """Step time of a variant over that of the fastest of `others`."""
    variants = record["variants"]
    known = [(time, name) for name in others if (time := step_ms(variants.get(name, {}))) is not None]
    mine = step_ms(variants.get(ours, {}))
    if mine is None or not known:
        return Row(record["section"], what or f"step of {ours}", None, bar, missing(variants, [ours, *others]))
    best, name = min(known)
    pairs = zip(rounds(variants[ours]), rounds(variants[name]), strict=False)
    by_round = [statistics.median(a) / statistics.median(b) for a, b in pairs]
    count = min(sum(map(len, rounds(variants[each]))) for each in (ours, name))
    problem = "" if count >= LEAST_STEPS or bar is None else f"of {count} steps only"
    note = f"{mine:.2f} / {best:.2f} ms ({name}); rounds {min(by_round):.3f} to {max(by_round):.3f}; {count} steps"
    return Row(record["section"], what or f"step of {ours} / {name}", mine / best, bar, note, problem)


def missing(variants: Record, names: Sequence[str]) -> str:
    """Why a figure is not there."""
    errors = [f"{name}: {variants[name]['error'].splitlines()[0][:120]}" for name in names if "error" in variants.get(name, {})]
    return "; ".join(errors) or "no figures"


def memory_row(record: Record, ours: str, other: str, bar: float | None) -> Row:
    """Peak memory of a variant over that of another."""
    variants = record["variants"]
    mine, theirs = memory(variants.get(ours, {})), memory(variants.get(other, {}))
    reached = ratio(mine, theirs)
    symmetric = variants.get(ours, {}).get("symmetric_bytes", 0)
    note = (
        f"{mine / GIB:.2f} / {theirs / GIB:.2f} GiB, {symmetric / GIB:.2f} of it symmetric"
        if mine and theirs
        else missing(variants, [ours, other])
    )
    held = [variants.get(name, {}).get("peak_reserved_bytes") for name in (ours, other)]
    if reached is not None and all(held):
        note += f"; held by the allocator {ratio(held[0] + symmetric, held[1]):.3f} ({held[0] / GIB:.2f} / {held[1] / GIB:.2f} GiB)"
    return Row(record["section"], f"peak memory of {ours} / {other}", reached, bar, note)


def loss_row(record: Record, ours: str, other: str) -> Row:
    """Difference of the first losses: the runtimes train the same model."""
    first = [record["variants"].get(name, {}).get("losses") for name in (ours, other)]
    if not first[0] or not first[1]:
        return Row(record["section"], f"first loss of {ours} - {other}", None, 2e-5, missing(record["variants"], [ours, other]))
    later = max(abs(a - b) for a, b in zip(*first, strict=False))
    return Row(
        record["section"],
        f"first loss of {ours} - {other}",
        abs(first[0][0] - first[1][0]),
        2e-5,
        f"largest of {len(first[0])}: {later:.2g}",
    )


def exposed_rows(record: Record, names: Sequence[str]) -> Iterator[Row]:
    """Exposed communication from the traces; no bars."""
    for name in names:
        profile = record["variants"].get(name, {}).get("profile")
        if profile:
            note = f"communication {profile['communication_ms']:.2f} ms in {profile['communication_calls']:.0f} calls, idle {profile['idle_ms']:.2f} ms"
            yield Row(record["section"], f"exposed communication of {name}, ms", profile["exposed_ms"], None, note)


def compare(bars: Mapping[str, float]) -> Callable[[Record], Iterator[Row]]:
    """Rows of a section that races against both wrappings; `bars` by variant, a missing one has no bar."""

    def found(record: Record) -> Iterator[Row]:
        mine = [name for name in ("ours", "ours-copy-engine") if name in record["variants"] or name in bars]
        for name in mine:
            yield time_row(record, name, ("fsdp-plain", "fsdp-best"), bars.get(name))
        for name in mine:
            yield memory_row(record, name, "fsdp-best", 1.0)
            yield loss_row(record, name, "fsdp-best")
        yield from exposed_rows(record, ("fsdp-best", *mine))

    return found


def graph_rows(record: Record) -> Iterator[Row]:
    """`small-graph`."""
    for name in ("ours-captured", "ours-copy-engine-captured"):
        yield time_row(record, name, ("fsdp-best",), 0.10)
        yield memory_row(record, name, "fsdp-best", 1.0)
        yield loss_row(record, name, "fsdp-best")
    yield from exposed_rows(record, ("ours-captured", "ours-copy-engine-captured"))


def one_rows(record: Record) -> Iterator[Row]:
    """`one`."""
    for name in ("ours", "ours-copy-engine"):
        yield time_row(record, name, ("ours-one",), 1.01)
    yield time_row(record, "ours-one", ("fsdp-one",), None)


def fp8_rows(record: Record) -> Iterator[Row]:
    """`fp8`."""
    variants = record["variants"]
    for suffix in ("", "-copy-engine"):
        yield time_row(record, f"fp8{suffix}", (f"bf16{suffix}",), 0.80)
    # What one gains who changes both; transports that differ are no comparison of payloads.
    yield time_row(record, "fp8-copy-engine", ("bf16",), None)
    narrow, wide = (moved(variants.get(name, {}), "unshard blocks.") for name in ("fp8", "bf16"))
    yield Row(
        "fp8",
        "wire bytes of quantised buckets, fp8 / bf16",
        ratio(narrow or None, wide),
        0.51,
        f"{narrow / 1e6:.1f} / {wide / 1e6:.1f} MB a step",
    )
    for suffix in ("", "-copy-engine"):
        row = memory_row(record, f"fp8{suffix}", f"bf16{suffix}", 1.0)
        # Lower, not equal.
        yield dataclasses.replace(row, bar=math.nextafter(1.0, 0.0))
    yield from exposed_rows(record, tuple(variants))


def fp8_loss_rows(record: Record) -> Iterator[Row]:
    """`fp8-loss`: how far FP8 is from bfloat16, over how far bfloat16 is from itself."""
    curves = {name: entry.get("losses") for name, entry in record["variants"].items()}
    base, fp8 = curves.get("bf16"), curves.get("fp8")
    for name, label in (("bf16-again", "a second bfloat16 run"), ("bf16-other-seed", "bfloat16 from another seed")):
        what, other = f"200 losses: |fp8 - bf16| / |{name} - bf16|", curves.get(name)
        bar = 1.0 if name == "bf16-other-seed" else None
        if not base or not fp8 or not other:
            yield Row("fp8-loss", what, None, bar, missing(record["variants"], ["bf16", "fp8", name]))
            continue
        if base == fp8:
            yield Row("fp8-loss", what, None, bar, "fp8 has bfloat16's very losses: nothing was quantised")
            continue
        ours, spread = (max(abs(a - b) for a, b in zip(curve, base, strict=True)) for curve in (fp8, other))
        last = [statistics.fmean(curve[-len(curve) // 10 :]) for curve in (base, fp8, other)]
        note = f"largest {ours:.4f} / {spread:.4f} ({label}); {len(base)} steps, last tenth bf16 {last[0]:.4f}, fp8 {last[1]:.4f}, other {last[2]:.4f}"
        yield Row("fp8-loss", what, ratio(ours, spread) if spread else math.inf, bar, note)


def host_rows(record: Record) -> Iterator[Row]:
    """`host`."""
    for name, entry in record["variants"].items():
        host = entry.get("host")
        update = (
            f", the update inside backward {host['update_ms_per_bucket']:.3f} ms apart" if host and "update_ms_per_bucket" in host else ""
        )
        note = f"{host['buckets']} buckets{update}" if host else missing(record["variants"], [name])
        yield Row("host", f"host ms per bucket, {name}", host and host["ms_per_bucket"], 0.30, note)


def bytes_rows(record: Record) -> Iterator[Row]:
    """`bytes`: over all ranks."""
    for name, entry in record["variants"].items():
        real = true = 0
        for traffic, demanded in entry.get("by_rank", []):
            for what, each in traffic.items():
                if what in demanded:
                    real += each["bytes"]
                    true += each["calls"] * demanded[what]
        note = f"{real / 1e6:.3f} / {true / 1e6:.3f} MB" if true else missing(record["variants"], [name])
        yield Row("bytes", f"bytes moved / true bytes, {name}", ratio(real, true) if true else None, 1.02, note)


def muon_rows(record: Record) -> Iterator[Row]:
    """The file of `muon_gpu.py`: the optimizer's step alone, against all ranks doing everything on gathered gradients."""
    base = "fsdp, float32"
    for size, bar in (("large", 0.21), ("small", 0.05)):
        found = record.get(size, {})
        variants = found.get("variants", {})
        times = {name: statistics.median(entry["ms"]) for name, entry in variants.items() if entry.get("ms")}
        for name in ("owned", "owned, graph"):
            note = (
                f"{times[name]:.2f} / {times[base]:.2f} ms; {len(variants[name]['ms'])} steps"
                if {name, base} <= times.keys()
                else missing(variants, [name, base])
            )
            yield Row("muon", f"{size}: step of {name} / {base}", ratio(times.get(name), times.get(base)), bar, note)
        traced = variants.get("owned", {}).get("trace", {})
        calls = traced["collective_calls"] + traced["collective_kernels"] if "collective_calls" in traced else None
        yield Row("muon", f"{size}: collectives in the step of owned", calls, 0.0, "calls and kernels of one traced step")
        checks = [each for rank in found.get("compared", {}).values() for each in rank.get("torch.optim.Muon", {}).values()]
        far = max((each["largest_difference"] for each in checks), default=None)
        worse = max((each["error"] / each["error_of_torch"] for each in checks), default=None)
        yield Row("muon", f"{size}: largest difference from torch.optim.Muon", far, 2e-4, f"{len(checks)} matrices")
        yield Row("muon", f"{size}: Newton-Schulz error against float64 / torch's", worse, 1.0, f"the worst of {len(checks)} matrices")


SECTIONS: dict[str, Callable[[Record], Iterator[Row]]] = {
    "large": compare({"ours": 0.93, "ours-copy-engine": 0.905}),
    "small-eager": compare({}),
    "small-compiled": compare({"ours": 0.50}),
    "small-graph": graph_rows,
    "one": one_rows,
    "fp8": fp8_rows,
    "fp8-loss": fp8_loss_rows,
    "host": host_rows,
    "bytes": bytes_rows,
    "muon": muon_rows,
}


def load(folder: Path) -> dict[str, Any]:
    """The records of a folder by section."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            continue
        if record.get("section") in SECTIONS:
            found[record["section"]] = record
        elif "fsdp, float32" in record.get("large", {}).get("variants", {}):
            found["muon"] = {"section": "muon", "complete": True, **record.get("facts", {}), **record}
    return found


def table(records: Mapping[str, Any]) -> list[Row]:
    """All rows, in the sections' order; a section without a file is one row that was not measured."""
    rows: list[Row] = []
    for section, make in SECTIONS.items():
        if section not in records:
            rows.append(Row(section, "", None, 0.0, "no file"))
            continue
        record = records[section]
        mine = list(make(record))
        if not record.get("complete", False):
            mine = [dataclasses.replace(row, problem=row.problem or "the run was cut off") for row in mine]
        if record.get("debug_sizes"):
            mine = [dataclasses.replace(row, problem="of debug sizes") for row in mine]
        rows += mine
    return rows


def markdown(rows: Sequence[Row], records: Mapping[str, Any]) -> str:
    """The table, and what ran."""
    lines = ["| Section | What | Reached | Bar | Verdict | Behind it |", "|---|---|---:|---:|---|---|"]
    for row in rows:
        reached = "" if row.reached is None else f"{row.reached:.3g}" if abs(row.reached) < 1e-2 else f"{row.reached:.3f}"
        bar = "" if row.bar is None or row.note == "no file" else f"{row.bar:.3g}" if row.bar < 1e-2 else f"{row.bar:.3f}"
        lines.append(f"| {row.section} | {row.what} | {reached} | {bar} | {row.verdict} | {row.note} |")
    lines.append("")
    for section, record in records.items():
        versions = ", ".join(f"{key} {value}" for key, value in record.get("versions", {}).items())
        changes = f"; changed: {record['changes']}" if record.get("changes") else ""
        lines.append(f"* {section}: {record.get('world')} x {record.get('device')}, {versions}, commit {record.get('commit')}{changes}")
    return "\n".join(lines)


def main() -> int:
    """Print; 1 unless every bar is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    records = load(arguments.folder)
    rows = table(records)
    if arguments.json:
        print(json.dumps([{**dataclasses.asdict(row), "verdict": row.verdict} for row in rows], indent=1))
    else:
        print(markdown(rows, records))
    return int(any(row.verdict.startswith("not") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
