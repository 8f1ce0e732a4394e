"""Operators that eager code calls without the dispatcher: they are there for whoever traces or watches, and only then."""

from __future__ import annotations

from typing import Any

import torch
from intarsia_kernels.direct import direct_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

RAN: list[type] = []


@direct_op("intarsia_tests::doubled")
def doubled(x: torch.Tensor) -> torch.Tensor:
    RAN.append(type(x))
    return x + x


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_plain_tensors_go_straight(monkeypatch: Any) -> None:
    x = torch.arange(3.0)
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", lambda *_: (_ for _ in ()).throw(AssertionError("dispatched")))
    assert doubled(x).tolist() == [0, 2, 4] and doubled(torch.nn.Parameter(x)).shape == (3,)


def test_modes_and_fake_tensors_see_the_operator() -> None:
    with _Names() as names:
        assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert any("intarsia_tests.doubled" in name for name in names.seen)
    with FakeTensorMode() as mode:
        fake = torch.ones(2)
    assert doubled(fake).shape == (2,) and type(doubled(fake)) is type(fake) and mode is fake.fake_mode  # type: ignore[attr-defined]


def test_compilers_see_the_operator() -> None:
    graphs: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(module.graph))
        return module.forward

    compiled = torch.compile(lambda x: doubled(x) + 1, backend=backend, fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert "intarsia_tests.doubled" in graphs[0]
