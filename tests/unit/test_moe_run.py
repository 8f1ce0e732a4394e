"""Mixtures of experts in a run: float32 routers in a bfloat16 run, the event of loads, the heat-map, checkpoints that keep the bias."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from intarsia import plugins
from intarsia.cli import main
from intarsia.contracts import Run
from intarsia.errors import UsageError
from intarsia.parameters import ParameterTable
from intarsia_deepseek_v3.config import debug
from intarsia_flexshard.assign import assign, kept_wide
from intarsia_flexshard.config import BucketConfig, FlexShardConfig
from intarsia_models_common.moe.metrics import record_loads
from intarsia_models_common.moe.report import events_of, heat_map, report, shade
from intarsia_models_common.moe.router import Router


@pytest.fixture(scope="module")
def model() -> Any:
    with torch.device("meta"):
        return plugins.current().build(debug())


def test_routers_stay_float32_in_a_bfloat16_run(model: Any) -> None:
    table = ParameterTable.from_model(model, "float32", "bfloat16", "float32")
    wide = kept_wide(model)
    routers = [name for name in table if name.endswith("router.weight")]
    assert sorted(wide) == sorted(routers) and len(routers) == 4

    def dtypes(config: FlexShardConfig, compute: str = "bfloat16") -> dict[str, tuple[str, str, str]]:
        specs = assign(config, table.values(), model.regions().blocks, None, compute, "float32", wide=wide)
        return {info.name: (spec.name, spec.compute, spec.payload) for spec in specs for info in spec.infos}

    found = dtypes(FlexShardConfig(payload="fp8"))
    for name, (bucket, compute, payload) in found.items():
        assert compute == ("float32" if name in routers else "bfloat16"), name
        assert (payload == "plain" and bucket.endswith(":float32")) == (name in routers), name
    assert {compute for _, compute, _ in dtypes(FlexShardConfig(), "float32").values()} == {"float32"}
    # What a bucket says of itself holds.
    told = FlexShardConfig(buckets=(BucketConfig(name="all", match=("*",), compute="bfloat16"),))
    assert {compute for _, compute, _ in dtypes(told).values()} == {"bfloat16"}
    assert dtypes(FlexShardConfig(buckets=(BucketConfig(name="routers", match=("*.router",)),)))[routers[0]][:2] == ("routers", "float32")


def test_the_event_of_loads() -> None:
    router = plugins.current().build(
        debug().layers[1].feed_forward.router, SimpleNamespace(name="layers.7.feed_forward.router", dim=8, std=0.1)
    )
    assert isinstance(router, Router)
    written: list[dict[str, Any]] = []
    recipe = SimpleNamespace(train=SimpleNamespace(log_every=2, steps=5))
    run = Run(
        recipe,
        Path(),
        parts={"model": torch.nn.ModuleList([router])},
        record=lambda event, **fields: written.append({"event": event, **fields}),
    )
    record_loads(run, 1)
    assert not written  # nothing counted yet
    router.load_E = torch.tensor([6.0, 2, 0, 0, 2, 2, 2, 2, 8.0, 16.0, 4.0], dtype=torch.float64)
    record_loads(run, 0)
    record_loads(run, 2)
    assert not written  # steps that are not logged
    record_loads(run, 1)
    record_loads(run, 4)
    assert [event["step"] for event in written] == [2, 5]
    facts = written[0]["layers"]["7"]
    assert facts == {"load": [0.375, 0.125, 0, 0, 0.125, 0.125, 0.125, 0.125], "entropy": 2.0, "dropped": 0.25, "max_violation": 2.0}


def test_the_heat_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [shade(value) for value in (0.0, 1.0, 1.99, 2.0, 9.0)] == [" ", "+", "@", "@", "@"]
    balanced = {"load": [0.25] * 4, "entropy": 1.0, "dropped": 0.0, "max_violation": 0.0}
    skewed = {"load": [0.5, 0.5, 0.0, 0.0], "entropy": 1.0, "dropped": 0.125, "max_violation": 1.0}
    events = [{"event": "moe", "step": step, "layers": {"1": balanced, "2": skewed}} for step in (10, 20)]
    events.insert(1, {"event": "moe", "step": 20, "layers": {"1": skewed}})  # run again after a resume
    (tmp_path / "events.jsonl").write_text("\n".join(json.dumps(event) for event in [{"event": "step", "text": '"moe"'}, *events]) + "\n")
    assert [event["step"] for event in events_of(tmp_path)] == [10, 20]
    assert main(["moe", "report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 20" and "layer 1 |++++|" in lines[2] and "layer 2 |@@  |" in lines[3] and "dropped 12.50%" in lines[3]
    with open(tmp_path / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(events[-1] | {"step": 30})[:-20])  # the run is writing a line
    assert [event["step"] for event in events_of(tmp_path)] == [10, 20]
    assert len(list(report(tmp_path, layer="2"))) == 4 and "step 10" in next(iter(report(tmp_path, step=10)))
    wide = list(heat_map({"a": {"load": [1 / 256] * 256, "entropy": 0.0, "dropped": 0.0, "max_violation": 0.0}}))
    assert "2 to a character" in wide[0] and "+" * 128 in wide[1]
    assert "entropy not finite" in list(heat_map({"a": balanced | {"entropy": None}}))[1]
    for arguments, text in (({"layer": "3"}, "no layer '3'"), ({"step": 14}, "Nearest: 10")):
        with pytest.raises(UsageError, match=text):
            list(report(tmp_path, **arguments))
    with pytest.raises(UsageError, match="name the directory of a run"):
        list(report(tmp_path / "nowhere"))
    (tmp_path / "events.jsonl").write_text('{"event": "step"}\n')
    with pytest.raises(UsageError, match="no event `moe`"):
        list(report(tmp_path))


def test_a_run_leaves_loads(tmp_path: Path) -> None:
    """Through the command: events on rank 0, the same loads with recomputation and accumulation."""
    loads = []
    for number, more in enumerate((["train.micro_batch=2"], ["recompute.mode=blocks", "train.micro_batch=1"])):
        folder = tmp_path / str(number)
        small = [
            "train.steps=2",
            "train.sequence_length=32",
            "train.global_batch=2",
            "train.threads=1",
            "optimizer=adamw",
        ]
        small += ["optimizer.lr=0.001", "evaluation.every=0", "checkpoint.every=0", "data.held_out=0.0", "train.device=cpu"]
        assert main(["train", "deepseek_v3/debug", "--dir", str(folder), "--quiet", *small, *more]) == 0
        loads.append([event["layers"] for event in events_of(folder)])
    assert [list(layers) for layers in loads[0]] == [["1", "2", "3", "mtp.0"]] * 2
    for one, other in zip(*loads, strict=True):
        for label in one:
            assert one[label]["load"] == pytest.approx(other[label]["load"], abs=0.02), label
            assert sum(one[label]["load"]) == pytest.approx(1.0, abs=1e-4)
