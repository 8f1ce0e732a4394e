"""The device facade on a CPU."""

from __future__ import annotations

import pytest
import torch
from intarsia import device as devices
from intarsia.errors import UsageError


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.select().type == devices.select("cpu").type == "cpu"
    with pytest.raises(UsageError, match="no CUDA device"):
        devices.select("cuda")
    with pytest.raises(UsageError, match="auto, cpu or cuda"):
        devices.select("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert devices.select() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UsageError, match="LOCAL_RANK is 2, but this machine shows 2"):
        devices.select()


def test_peak_flops_by_the_longest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.peak_flops(torch.device("cpu"), "float32") is None
    names = {
        "NVIDIA H200": 9.89e14,
        "NVIDIA H100 PCIe": 7.56e14,
        "NVIDIA H100 80GB HBM3": 9.89e14,
        "NVIDIA GB200": 2.5e15,
        "Unheard of": None,
    }
    for name, flops in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert devices.peak_flops(torch.device("cuda", 0), "bfloat16") == flops
        assert devices.peak_flops(torch.device("cuda", 0), "int4") is None


def test_facts_of_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert "cpu" in devices.capabilities() and ("cuda" in devices.capabilities()) == torch.cuda.is_available()
    before = devices.peak_memory(cpu)
    block = torch.ones(8 * 2**20)
    assert devices.peak_memory(cpu) >= before > 2**20 and block.numel()
    assert "CPU" in devices.describe(cpu) and "thread" in devices.describe(cpu)
