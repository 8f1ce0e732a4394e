"""The table of FlexShard's benchmark: ratios, bars and what is missing, from made-up files."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "flexshard_table.py"
GIB = 2**30


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flexshard_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def variant(ms: float, gib: float = 1.0, losses: tuple[float, ...] = (5.0, 4.0), rounds: int = 6, **more: Any) -> dict[str, Any]:
    """Rank 1 is the slower one in every second step: then a step takes `ms`, else rank 0 does."""
    steps = {"0": [[ms, ms * 0.5, ms, ms * 0.5, ms]] * rounds, "1": [[ms * 0.5, ms, ms * 0.5, ms, ms]] * rounds}
    return {"steps_ms": steps, "peak_allocated_bytes": gib * GIB, "symmetric_bytes": 0, "losses": list(losses), **more}


def section(name: str, variants: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "benchmark": "flexshard_gpu",
        "section": name,
        "complete": True,
        "world": 2,
        "device": "NVIDIA H200",
        "variants": variants,
        **more,
    }


def good() -> dict[str, dict[str, Any]]:
    """Files in which every bar is met."""
    profile = {"exposed_ms": 3.0, "idle_ms": 0.5, "communication_ms": 20.0, "communication_calls": 30.0}
    compared = {"fsdp-plain": variant(101.0, 3.1), "fsdp-best": variant(100.0, 3.0, profile=profile)}
    gathers = {
        "unshard blocks.0": {"calls": 1, "bytes": 100},
        "unshard blocks.1": {"calls": 2, "bytes": 300},
        "unshard head": {"calls": 1, "bytes": 999},
    }
    halved = {what: {"calls": 1, "bytes": 51 * each["bytes"] // 100 if "blocks" in what else 999} for what, each in gathers.items()}
    captured = {"captured": True, "reserved_growth_bytes": 2 * GIB}
    large = {**compared, "ours": variant(92.0, 2.9, profile=profile), "ours-copy-engine": variant(90.0, 2.0, symmetric_bytes=GIB)}
    return {
        "large": section("large", large),
        "small-eager": section("small-eager", {**compared, "ours": variant(80.0, 2.9)}),
        "small-compiled": section("small-compiled", {**compared, "ours": variant(49.0, 2.9), "ours-copy-engine": variant(50.0, 2.9)}),
        "small-graph": section(
            "small-graph",
            {
                "fsdp-best": variant(100.0, 3.0),
                "ours-captured": variant(9.0, 9.0, **captured),
                "ours-copy-engine-captured": variant(8.0, 9.0, **captured),
            },
        ),
        "one": section(
            "one", {"ours-one": variant(100.0), "ours": variant(101.0), "ours-copy-engine": variant(99.0), "fsdp-one": variant(106.0)}
        ),
        "fp8": section(
            "fp8",
            {
                "bf16": variant(10.0, captured=True, reserved_growth_bytes=10, traffic=gathers),
                "fp8": variant(8.0, captured=True, reserved_growth_bytes=9, traffic=halved),
                "bf16-copy-engine": variant(10.0, captured=True, reserved_growth_bytes=10),
                "fp8-copy-engine": variant(7.0, captured=True, reserved_growth_bytes=9),
            },
        ),
        "fp8-loss": section(
            "fp8-loss",
            {
                "bf16": {"losses": [5.0, 4.0, 3.0]},
                "bf16-again": {"losses": [5.0, 4.0, 3.1]},
                "bf16-other-seed": {"losses": [5.2, 4.0, 3.0]},
                "fp8": {"losses": [5.0, 4.1, 3.0]},
            },
        ),
        "host": section("host", {"eager": {"host": {"ms_per_bucket": 0.29, "buckets": 27}}}),
        "bytes": section(
            "bytes",
            {
                "owned": {
                    "by_rank": [[{"unshard a": {"calls": 2, "bytes": 202}, "other": {"calls": 1, "bytes": 5}}, {"unshard a": 100}]] * 2
                }
            },
        ),
        "muon": {"section": "muon", "complete": True, **muon()},
    }


def muon() -> dict[str, Any]:
    check = {"largest_difference": 1e-4, "error": 0.01, "error_of_torch": 0.02}
    one = {
        "variants": {
            "fsdp, float32": {"ms": [300.0] * 32},
            "owned": {"ms": [15.0] * 32, "trace": {"collective_calls": 0, "collective_kernels": 0}},
            "owned, graph": {"ms": [14.0] * 32},
        },
        "compared": {"rank 0": {"torch.optim.Muon": {"4 x 4": check}}, "rank 1": {"torch.optim.Muon": {"8 x 4": dict(check)}}},
    }
    return {"facts": {"device": "NVIDIA H200"}, "large": one, "small": copy.deepcopy(one)}


def rows_of(table: ModuleType, records: dict[str, Any]) -> dict[str, Any]:
    return {f"{row.section}: {row.what}": row for row in table.table(records)}


def test_every_bar_is_met(table: ModuleType) -> None:
    rows = rows_of(table, good())
    assert {what: row.verdict for what, row in rows.items() if row.bar is not None and row.verdict != "met"} == {}
    assert rows["large: step of ours / fsdp-best"].reached == pytest.approx(0.92)
    assert rows["large: peak memory of ours-copy-engine / fsdp-best"].reached == pytest.approx(1.0)
    assert rows["small-graph: peak memory of ours-captured / fsdp-best"].reached == pytest.approx(2 / 3)
    assert rows["one: step of ours / ours-one"].reached == pytest.approx(1.01)
    assert rows["fp8: wire bytes of quantised buckets, fp8 / bf16"].reached == pytest.approx(0.51)
    assert rows["fp8-loss: 200 losses: |fp8 - bf16| / |bf16-other-seed - bf16|"].reached == pytest.approx(0.5)
    assert rows["bytes: bytes moved / true bytes, owned"].reached == pytest.approx(1.01)
    assert rows["large: exposed communication of ours, ms"].reached == 3.0 and not rows["large: exposed communication of ours, ms"].verdict


def test_a_step_takes_as_long_as_on_the_slower_rank(table: ModuleType) -> None:
    assert table.step_ms(variant(10.0)) == 10.0
    assert table.step_ms({**variant(10.0), "error": "RuntimeError"}) is None
    assert table.step_ms({}) is None


@pytest.mark.parametrize(
    ("name", "changed", "value", "what"),
    [
        ("large", "ours", variant(93.5, 2.9), "step of ours / fsdp-best"),
        ("large", "ours-copy-engine", variant(90.6, 2.0), "step of ours-copy-engine / fsdp-best"),
        ("large", "ours-copy-engine", variant(90.0, 2.5, symmetric_bytes=GIB), "peak memory of ours-copy-engine / fsdp-best"),
        ("large", "ours", variant(90.0, 2.5, losses=(5.1, 4.0)), "first loss of ours - fsdp-best"),
        ("small-compiled", "ours", variant(51.0, 2.9), "step of ours / fsdp-best"),
        (
            "small-graph",
            "ours-captured",
            variant(9.0, captured=True, reserved_growth_bytes=4 * GIB),
            "peak memory of ours-captured / fsdp-best",
        ),
        ("small-graph", "ours-captured", variant(11.0), "step of ours-captured / fsdp-best"),
        ("one", "ours", variant(102.0), "step of ours / ours-one"),
        ("fp8", "fp8", variant(8.1, traffic={"unshard blocks.0": {"calls": 1, "bytes": 300}}), "step of fp8 / bf16"),
        (
            "fp8",
            "fp8",
            variant(8.1, traffic={"unshard blocks.0": {"calls": 1, "bytes": 300}}),
            "wire bytes of quantised buckets, fp8 / bf16",
        ),
        ("fp8", "fp8", variant(8.0, captured=True, reserved_growth_bytes=10), "peak memory of fp8 / bf16"),
        ("fp8-loss", "fp8", {"losses": [5.0, 4.3, 3.0]}, "200 losses: |fp8 - bf16| / |bf16-other-seed - bf16|"),
        ("host", "eager", {"host": {"ms_per_bucket": 0.31, "buckets": 27}}, "host ms per bucket, eager"),
        (
            "bytes",
            "owned",
            {"by_rank": [[{"unshard a": {"calls": 1, "bytes": 103}}, {"unshard a": 100}]]},
            "bytes moved / true bytes, owned",
        ),
    ],
)
def test_a_bar_that_is_missed_is_said(table: ModuleType, name: str, changed: str, value: dict[str, Any], what: str) -> None:
    records = good()
    records[name]["variants"][changed] = value
    assert rows_of(table, records)[f"{name}: {what}"].verdict.startswith("not met by ")


def test_the_bars_of_muon(table: ModuleType) -> None:
    records = good()
    small, large = records["muon"]["small"], records["muon"]["large"]
    small["variants"]["owned"]["ms"] = [15.1] * 32
    small["variants"]["owned"]["trace"]["collective_calls"] = 1
    large["compared"]["rank 1"]["torch.optim.Muon"]["8 x 4"] |= {"largest_difference": 3e-4, "error": 0.021}
    del large["variants"]["owned, graph"]
    verdicts = {
        what: row.verdict.split(" by ")[0]
        for what, row in rows_of(table, records).items()
        if row.section == "muon" and row.verdict != "met"
    }
    assert verdicts == {
        "muon: large: step of owned, graph / fsdp, float32": "not measured",
        "muon: large: largest difference from torch.optim.Muon": "not met",
        "muon: large: Newton-Schulz error against float64 / torch's": "not met",
        "muon: small: step of owned / fsdp, float32": "not met",
        "muon: small: collectives in the step of owned": "not met",
    }


def test_the_opponent_is_the_faster_wrapping(table: ModuleType) -> None:
    records = good()
    records["large"]["variants"]["fsdp-plain"] = variant(95.0)
    assert rows_of(table, records)["large: step of ours / fsdp-plain"].verdict.startswith("not met")


def test_what_is_missing_or_doubtful_is_no_success(table: ModuleType) -> None:
    records = good()
    del records["host"]
    records["large"]["variants"]["ours"] = {"error": "RuntimeError: out of memory\nmore"}
    records["one"]["variants"]["ours"] = variant(100.0, rounds=5)
    records["small-graph"]["complete"] = False
    records["small-compiled"]["debug_sizes"] = True
    records["fp8-loss"]["variants"]["fp8"] = records["fp8-loss"]["variants"]["bf16"]
    rows = rows_of(table, records)
    assert rows["host: "].verdict == "not measured"
    curve = rows["fp8-loss: 200 losses: |fp8 - bf16| / |bf16-other-seed - bf16|"]
    assert curve.verdict == "not measured" and "nothing was quantised" in curve.note
    assert rows["large: step of ours"].verdict == "not measured" and "out of memory" in rows["large: step of ours"].note
    assert rows["one: step of ours / ours-one"].verdict == "met, but of 25 steps only"
    assert rows["small-graph: step of ours-captured / fsdp-best"].verdict == "met, but the run was cut off"
    assert rows["small-compiled: step of ours / fsdp-best"].verdict == "met, but of debug sizes"


def test_the_command_reads_a_folder(table: ModuleType, tmp_path: Path) -> None:
    for name, record in good().items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    (tmp_path / "muon.json").write_text(json.dumps(muon()))
    (tmp_path / "other.json").write_text("[1]")
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| large | step of ours / fsdp-best | 0.920 | 0.930 | met |" in done.stdout and "2 x NVIDIA H200" in done.stdout
    (tmp_path / "one.json").unlink()
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path), "--json"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert [row["section"] for row in json.loads(done.stdout) if row["verdict"] == "not measured"] == ["one"]


def test_exposed_time_is_when_only_communication_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    exposure = importlib.import_module("flexshard_measure").exposure
    spans = [(0.0, 4.0, False), (3.0, 6.0, True), (5.0, 7.0, True), (8.0, 9.0, False)]
    assert exposure(spans) == {"compute_only": 4.0, "both": 1.0, "exposed": 3.0, "idle": 1.0}
    assert exposure([]) == {"compute_only": 0.0, "both": 0.0, "exposed": 0.0, "idle": 0.0}
