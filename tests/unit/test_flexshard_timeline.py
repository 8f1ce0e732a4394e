"""A step's timeline: it adds up, it says whose time it was, it is absent when nobody asks, and it changes no number."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _sharded import make
from intarsia.comm import FakeCommunicator
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_console.timeline import lines
from intarsia_flexshard.config import FlexShardConfig
from intarsia_flexshard.timeline import Timeline, timeline
from intarsia_placements.config import Flat
from intarsia_testing.clock import ManualClock
from torch import nn

SLOW_S = 0.03


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """What the timeline measures by: nothing takes time but a sleep."""
    made = ManualClock(0.0)
    monkeypatch.setattr("intarsia_flexshard.timeline.time", made)
    return made


class Shift:
    """An optimizer that moves every master a little."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def step(self, factor: Any, names: Any = None) -> None:
        """As `intarsia.contracts.Optimizer.step`."""
        for name in self.parameters if names is None else names:
            self.parameters[name] -= 0.01 * self.parameters[name].grad


def built(twice: bool = False) -> tuple[Any, Any, Callable[..., None]]:
    """Model, sharded model, and a step, as one of two ranks has them; the other is not there."""
    config = FlexShardConfig(placement=Flat(unit=1))
    model, _, sharded, _ = make(FakeCommunicator(0, 2), {"twice": twice}, current().build(config))
    optimizer = Shift(dict(sharded.parameters()))

    def step(micro_batches: int = 1, early: bool = False) -> None:
        for number in range(micro_batches):
            sharded.set_last_micro_batch(number == micro_batches - 1)
            if early:
                with sharded.update_in_backward(optimizer, 1.0):
                    model(torch.arange(4).view(1, 4), True).sum().backward()
            else:
                model(torch.arange(4).view(1, 4), True).sum().backward()
        sharded.finish_gradients()
        sharded.update(optimizer, 1.0)
        sharded.zero_gradients()

    step()
    return model, sharded, step


def by_name(facts: dict[str, Any]) -> dict[str, Any]:
    return {row["bucket"]: row for row in facts["buckets"]}


@pytest.mark.parametrize("early", [False, True])
def test_times_add_up_to_the_step_and_bytes_to_what_was_moved(early: bool) -> None:
    _, sharded, step = built()
    with timeline(sharded) as found:
        begin = time.perf_counter()
        step(2, early)
        time.sleep(SLOW_S)
        seconds = time.perf_counter() - begin
    facts = found.facts()
    assert facts["clock"] == "host" and facts["step_ms"] >= seconds * 1000 > SLOW_S
    parts = [facts[name] for name in ("compute_ms", "exposed_ms", "update_ms", "rest_ms")]
    assert all(part > 0 for part in parts) and sum(parts) == pytest.approx(facts["step_ms"])
    assert [row["bucket"] for row in facts["buckets"]] == [bucket.name for bucket in sharded.buckets]
    for row, bucket in zip(facts["buckets"], sharded.buckets, strict=True):
        assert row["exposed_ms"] == pytest.approx(row["wait_ms"] + row["wait_sum_ms"])
        assert row["gathers"] >= 1 and row["gathered_bytes"] == row["gathers"] * bucket.gather.bytes
        assert row["reductions"] == 1 and row["reduced_bytes"] > 0 and row["reduce_ms"] > 0 < row["gather_ms"]
    assert json.loads(json.dumps(facts)) == facts


def test_time_is_put_down_to_who_took_it(monkeypatch: pytest.MonkeyPatch, clock: ManualClock) -> None:
    model, sharded, step = built(twice=True)
    two, one = (bucket for bucket in sharded.buckets if bucket.name in ("blocks.1", "blocks.2"))
    wait = one.gather.wait
    monkeypatch.setattr(one.gather, "wait", lambda: (clock.sleep(SLOW_S), wait()))
    add = two.reduction._add
    monkeypatch.setattr(two.reduction, "_add", lambda *arguments: (clock.sleep(SLOW_S), add(*arguments)))
    model.blocks[0].up.register_forward_hook(lambda *arguments: clock.sleep(SLOW_S))
    model.norm.register_full_backward_hook(lambda *arguments: clock.sleep(SLOW_S))
    with timeline(sharded) as found:
        step(2)
    rows = by_name(found.facts())
    slow = SLOW_S * 1000 - 1e-6
    assert rows["blocks.2"]["wait_ms"] >= slow and rows["blocks.2"]["gather_ms"] >= slow
    assert rows["blocks.1"]["wait_sum_ms"] >= slow and rows["blocks.1"]["reduce_ms"] >= slow
    assert rows["blocks.0"]["compute_ms"] >= 4 * slow, "called twice in each of two passes"
    assert rows["root"]["compute_ms"] >= 2 * slow, "the norm is the root's"
    assert max(rows[name]["compute_ms"] for name in ("blocks.1", "blocks.2")) < slow
    assert max(rows[name]["exposed_ms"] for name in ("root", "blocks.0")) < slow


def names_in(path: Path, work: Callable[[], None]) -> set[str]:
    with torch.profiler.profile() as profiler:
        work()
    profiler.export_chrome_trace(str(path))
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "user_annotation"}


def test_phases_are_named_in_a_trace_when_asked_for_and_only_then(tmp_path: Path) -> None:
    _, sharded, step = built()
    phases = ("gather", "wait", "forward", "backward", "reduce", "wait for sum of")

    def measured() -> None:
        with timeline(sharded):
            step()

    named = names_in(tmp_path / "named.json", measured)
    assert named >= {f"{phase} {bucket.name}" for phase in phases for bucket in sharded.buckets if bucket.name in ("blocks.1", "blocks.2")}
    assert any(name.startswith("update ") for name in named)
    assert sharded.lanes.observer is None
    plain = names_in(tmp_path / "plain.json", step)
    assert not [name for name in plain if name.startswith((*phases, "update"))]


def test_measuring_changes_no_number() -> None:
    results = []
    for measures in (False, True):
        _, sharded, step = built(twice=True)
        for _ in range(3):
            if measures:
                with timeline(sharded):
                    step(2)
            else:
                step(2)
        results.append(torch.cat([parameter.detach().flatten() for parameter in sharded.parameters().values()]))
    assert torch.equal(*results)


def test_what_cannot_be_measured_is_refused() -> None:
    _, sharded, step = built()
    with timeline(sharded) as found:
        with pytest.raises(UsageError, match="being measured already"):
            Timeline(sharded).start()
        step()
    found.stop()
    assert found.facts()["step_ms"] == found.facts()["step_ms"]
    sharded.self_contained = True
    with pytest.raises(UsageError, match="captured step has no timeline"):
        Timeline(sharded).start()


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    model, sharded, step = built()
    handle = model.blocks[1].down.register_forward_hook(lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError), timeline(sharded):
        step()
    handle.remove()
    assert sharded.lanes.observer is None


def test_a_long_table_shows_who_was_waited_for_and_the_rest_together() -> None:
    row = {**dict.fromkeys(("gather_ms", "wait_ms", "compute_ms", "reduce_ms", "wait_sum_ms"), 1.0), "gathers": 2, "reductions": 1}
    row |= {"gathered_bytes": 2**20, "reduced_bytes": 2**21}
    rows = [{**row, "bucket": f"layers.{number}", "exposed_ms": float(number)} for number in range(5)]
    facts = {"clock": "host", "step_ms": 20.0, "compute_ms": 5.0, "exposed_ms": 10.0, "update_ms": 1.0, "rest_ms": 4.0, "buckets": rows}
    text = lines(facts, longest=2)
    assert text[0] == "20.00 ms by the host's clock: compute 5.00 (25.0%), exposed 10.00 (50.0%), update 1.00 (5.0%), rest 4.00 (20.0%)"
    assert [line.split()[0] for line in text[2:]] == ["layers.3", "layers.4", "3", "together"]
    assert text[4].split() == ["3", "more", "6", "3.00", "3.00", "3.00", "3", "3.00", "3.00", "3.00", "3.00", "MiB", "6.00", "MiB"]
    assert len(lines(facts)) == 2 + 6
