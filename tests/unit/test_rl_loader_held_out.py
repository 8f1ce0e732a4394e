"""The held-out tasks are tried once for each version of the weights, however many ask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from intarsia_rl.contracts import Sample, Segment
from intarsia_rl.loader import HeldOutLoader, RolloutsLoader
from intarsia_rl.packing import Packing

SAMPLE = Sample("held_out/0/0", -1, 0, "task", (Segment((5, 6), (False, True), (0.0, -0.5), (-1, 0)),), reward=1.0)


def test_a_version_is_tried_once_by_the_run_and_by_cores_evaluation() -> None:
    asked: list[int] = []
    recorded: list[int] = []
    run = SimpleNamespace(step=0, record=lambda event, step, **found: recorded.append(step))

    def ask(method: str, step: int) -> dict[str, Any]:
        asked.append(step)
        return {"samples": [SAMPLE], "weights": [1.0], "counts": [1], "stats": {}}

    loader: Any = RolloutsLoader.__new__(RolloutsLoader)
    loader._run, loader._rank, loader._ranks, loader._packing = run, 0, 1, Packing(4, 1, 0)
    loader._held_out, loader.tokenizer = None, None
    loader._publish, loader._ask = lambda step: None, ask

    mine = loader.evaluate()
    [batch] = HeldOutLoader(loader).next_step() or []
    assert batch.labels_BS.tolist() == mine[0].labels_BS.tolist() == [[6, -100, -100, -100]]
    assert asked == recorded == [0]
    run.step = 1
    loader.evaluate()
    assert asked == recorded == [0, 1]
