"""Operators that eager code calls without the dispatcher: they are there for whoever traces or watches, and only then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import intarsia_kernels
import torch
from intarsia_kernels import direct
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


def test_nobody_who_goes_straight_wraps_kernels_by_torch() -> None:
    """torch's own `wrap_triton` would take each of their launches through the dispatcher again."""
    root = Path(intarsia_kernels.__file__).parent
    straight = [path for path in root.rglob("*.py") if "import direct_op" in (text := path.read_text()) or "direct_op," in text]
    assert len(straight) > 5
    wrong = [
        str(path.relative_to(root)) for path in straight if "from torch.library import" in path.read_text() and path.name != "direct.py"
    ]
    assert not wrong, f"they import from torch.library what intarsia_kernels.direct has: {wrong}"


def test_kernels_are_wrapped_for_who_watches(monkeypatch: Any) -> None:
    kernel = object()
    monkeypatch.setattr(direct, "_traceable", lambda each: ("wrapped", each))
    assert direct.wrap_triton(kernel) is kernel
    with _Names():
        assert direct.wrap_triton(kernel) == ("wrapped", kernel)


def test_sizes_of_grids_and_blocks() -> None:
    assert [direct.cdiv(number, 16) for number in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [direct.power_of_two(number) for number in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
