"""Saving from a GPU: the copy is of the moment of the save, whatever the stream does next; loading fills GPU tensors."""

from __future__ import annotations

import pytest
import torch
from intarsia.contracts import StateItem
from intarsia_testing.doubles import MemoryStorage
from intarsia_testing.stateful import Holder, OverStorage, tensor_item

pytestmark = pytest.mark.gpu


def test_a_save_sees_the_moment_of_the_save() -> None:
    storage = MemoryStorage()
    weights = [torch.full((4096, 1024), float(index), device="cuda", dtype=torch.bfloat16) for index in range(8)]
    matrix = torch.randn(8192, 8192, device="cuda")
    table = torch.arange(10, device="cuda")
    manager = OverStorage(storage)
    items = [tensor_item(f"w{index}", weight) for index, weight in enumerate(weights)]
    # The stream is busy when the save comes, and overwrites everything right behind it.
    for _ in range(20):
        matrix = torch.tanh(matrix @ matrix)
    for weight in weights:
        weight.add_(1)
    manager.save(1, [Holder(*items, StateItem("a", "table", "replicated", table))])
    for weight in weights:
        weight.fill_(-1)
    table.zero_()
    manager.wait()
    manager.close()
    fresh = [torch.zeros(4096, 1024, device="cuda", dtype=torch.bfloat16) for _ in weights]
    holder = Holder(*(tensor_item(f"w{index}", weight) for index, weight in enumerate(fresh)), StateItem("a", "table", "replicated", table))
    loader = OverStorage(storage)
    ref = loader.latest()
    assert ref is not None and loader.load(ref, [holder]) == 1
    for index, weight in enumerate(fresh):
        assert weight.is_cuda and bool((weight == index + 1).all())
    assert holder.loaded is not None and holder.loaded["table"].tolist() == list(range(10))
