"""State of the process-wide random generators: saved whole, restored last, derived anew on another mesh."""

from __future__ import annotations

import random

import numpy
import torch
from intarsia.train.state import RandomState


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def saved(state: RandomState) -> dict[str, object]:
    return {item.name: item.value.clone() if isinstance(item.value, torch.Tensor) else item.value for item in state.state()}


def test_generators_go_on_where_they_were_whatever_set_up_draws() -> None:
    first = RandomState(seed=3, rank=0, device=torch.device("cpu"))
    first.restore(0)
    draw()
    values = saved(first)
    expected = draw()
    second = RandomState(seed=3, rank=0, device=torch.device("cpu"))
    second.load_state(values)
    torch.manual_seed(99)
    random.seed(99)
    numpy.random.seed(99)
    second.restore(7)
    assert draw() == expected and not second.rederived


def test_a_fresh_start_is_a_function_of_seed_and_rank() -> None:
    def begin(seed: int, rank: int, step: int = 0) -> tuple[float, float, float]:
        state = RandomState(seed, rank, torch.device("cpu"))
        state.restore(step)
        return draw()

    assert begin(1, 0) == begin(1, 0)
    assert len({begin(1, 0), begin(1, 1), begin(2, 0), begin(1, 0, 5)}) == 4


def test_on_another_mesh_they_are_derived_anew_and_it_is_known() -> None:
    state = RandomState(1, 0, torch.device("cpu"))
    state.load_state({}, missing_rank_state=True)
    state.restore(4)
    first = draw()
    state.restore(4)
    assert state.rederived and draw() == first


def test_every_item_belongs_to_the_rank_and_is_plain() -> None:
    items = RandomState(1, 0, torch.device("cpu")).state()
    assert {item.kind for item in items} == {"rank"} and {item.owner for item in items} == {"random"}
    assert {item.name for item in items} == {"python", "numpy", "torch"}
