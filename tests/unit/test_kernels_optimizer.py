"""Newton-Schulz by symmetric products as it is computed, products in plain torch; the launcher; what the distribution offers. Needs no Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from intarsia.plugins import current
from intarsia_kernels.optimizer import launch as launch_module
from intarsia_kernels.optimizer import newton_schulz as module
from intarsia_kernels.optimizer import reference
from intarsia_kernels.optimizer.launch import Launcher
from intarsia_kernels.optimizer.newton_schulz import newton_schulz, segments
from intarsia_optimizers import updates
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def spectra(rows: int, columns: int) -> dict[str, Tensor]:
    """Gradients that make it hard: strong directions in weak noise, singular values over decades, fewer directions than rows, a common sign."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    noise, left, right, side = draw(rows, columns), draw(rows, 16), draw(16, columns), min(rows, columns)
    q, p = torch.linalg.qr(draw(rows, side))[0], torch.linalg.qr(draw(columns, side))[0]
    return {
        "random": noise,
        "spiked": 0.02 * noise + (left * torch.logspace(1.5, -1, 16)) @ right,
        "decaying": (q * torch.logspace(0, -4, side)) @ p.mT,
        "low rank": left @ right,
        "of one sign": 0.3 * noise + 1,
    }


def error(found: Tensor, matrix: Tensor) -> float:
    exact = updates.newton_schulz(matrix[None].double(), 5, COEFFICIENTS, EPS, torch.float64)[0]
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("compensated", [True, False])
@pytest.mark.parametrize("shape", [(128, 448), (448, 128), (128, 128)])
def test_errors_are_a_third_of_torchs(shape: tuple[int, int], compensated: bool) -> None:
    for name, matrix in spectra(*shape).items():
        ours = newton_schulz(matrix[None], 5, COEFFICIENTS, EPS, torch.bfloat16, compensated=compensated)[0]
        assert ours.dtype == torch.float16
        theirs = error(_zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, EPS), matrix)
        assert error(ours, matrix) < theirs / 2.5, (name, error(ours, matrix), theirs)


def test_five_steps_on_one_gram_matrix_need_what_is_lost() -> None:
    matrix = spectra(128, 448)["spiked"]

    def forgetful(*operands: Tensor, lost_BMM: Tensor | None = None, **options: Any) -> None:
        reference.symmetric_product(*operands, **options)
        if lost_BMM is not None:
            lost_BMM.zero_()

    with_it, without = (
        error(newton_schulz(matrix[None], 5, COEFFICIENTS, EPS, torch.bfloat16, compensated=True, **how)[0], matrix)
        for how in ({}, {"product": forgetful})
    )
    assert without > 2.5 * with_it


@pytest.mark.parametrize("shape", [(128, 448), (448, 128)])
def test_a_polynomial_need_not_be_quite_symmetric(shape: tuple[int, int]) -> None:
    """As the BLAS library makes it, which computes both of its halves: from both sides it is applied by the one that is exact for strong directions."""

    def whole(x: Tensor, y: Tensor, out: Tensor, *, lost_BMM: Tensor | None = None, **options: Any) -> None:
        if lost_BMM is not None:
            reference.symmetric_product(x, y, out, lost_BMM=lost_BMM, **options)
            return
        left, right = (x.mT, y) if options.get("transposed") else (x, y.mT)
        sums = options["alpha"] * torch.bmm(left.float(), right.float())
        sums += sum(beta * addend.float() for addend, beta in options.get("addends", ()))
        sums.diagonal(dim1=-2, dim2=-1).add_(options.get("gamma", 0.0))
        factors = options.get("factors_B")
        out.copy_(sums if factors is None else sums * factors[:, None, None])

    matrix = spectra(*shape)["spiked"]
    found = newton_schulz(matrix[None], 5, COEFFICIENTS, EPS, torch.bfloat16, product=whole, compensated=True)[0]
    theirs = error(_zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, EPS), matrix)
    assert error(found, matrix) < theirs


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7, 11])
@pytest.mark.parametrize("compensated", [True, False])
def test_any_number_of_steps(steps: int, compensated: bool) -> None:
    matrix = spectra(48, 160)["random"]
    ours = newton_schulz(matrix[None], steps, COEFFICIENTS, EPS, torch.bfloat16, compensated=compensated)[0]
    exact = updates.newton_schulz(matrix[None].double(), steps, COEFFICIENTS, EPS, torch.float64)[0]
    assert float((ours.double() - exact).norm() / exact.norm()) < 2e-2


def test_batches_are_matrices_one_by_one_and_zeros_stay_zeros() -> None:
    matrices = torch.stack([spectra(64, 160)["random"], 1e-6 * spectra(64, 160)["spiked"], torch.zeros(64, 160)])
    together = newton_schulz(matrices.bfloat16(), 5, COEFFICIENTS, EPS, torch.bfloat16)
    squares = matrices.bfloat16().float().square().sum((1, 2))
    for rule in (newton_schulz, updates.newton_schulz):
        plain, told = (rule(matrices.bfloat16(), 5, COEFFICIENTS, EPS, torch.bfloat16, each) for each in (None, squares))
        torch.testing.assert_close(plain, told, rtol=0.05, atol=0.01)
    for matrix, found in zip(matrices.bfloat16(), together, strict=True):
        alone = newton_schulz(matrix[None].clone(), 5, COEFFICIENTS, EPS, torch.bfloat16)[0]
        torch.testing.assert_close(found, alone, rtol=2e-2, atol=2e-3)
    assert not together[2].any()


def test_large_coefficients_have_shorter_segments() -> None:
    assert segments(5, COEFFICIENTS[0], True) == [5]
    assert segments(5, COEFFICIENTS[0], False) == [3, 2]
    assert segments(7, COEFFICIENTS[0], True) == [4, 3]
    assert segments(5, 8.3, True) == [2, 2, 1]
    assert segments(3, 1.5, False) == [3]


def test_what_it_refuses() -> None:
    matrices = torch.ones(1, 4, 4)
    assert "float32" in str(module.supports(matrices, 5, COEFFICIENTS, EPS, torch.float32))
    assert module.supports(matrices.double(), 5, COEFFICIENTS, EPS, torch.bfloat16)
    assert module.supports(matrices[:0], 5, COEFFICIENTS, EPS, torch.bfloat16)
    assert module.supports(matrices, 5, COEFFICIENTS, EPS, torch.bfloat16) is None


def test_the_reference_says_what_it_loses() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 40, 24, generator=generator).half()
    s = torch.randn(2, 40, 40, generator=generator)
    s = (s + s.mT).half()
    out, lost = torch.empty_like(s), torch.empty_like(s)
    reference.symmetric_product(x, x, out, alpha=0.5, addends=[(s, 0.25), (s, 2.0)], gamma=3.0, lost_BMM=lost)
    exact = 0.5 * x.double() @ x.double().mT + 2.25 * s.double() + 3.0 * torch.eye(40, dtype=torch.float64)
    assert torch.equal(out, out.mT)
    assert float((out.double() - exact).abs().max()) > 1e-3
    assert float((out.double() + lost.double() / reference.LOST - exact).abs().max()) < 1e-5
    transposed = torch.empty_like(s)
    reference.symmetric_product(x.mT.contiguous(), x.mT.contiguous(), transposed, transposed=True, alpha=0.5)
    torch.testing.assert_close(transposed.float(), (0.5 * x.float() @ x.float().mT), rtol=1e-3, atol=1e-3)


class Compiled:
    """A compiled kernel: notes what it is called with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list[Any], breaks: bool = False) -> None:
        self.calls, self.breaks = calls, breaks

    def run(self, *arguments: Any) -> None:
        if self.breaks:
            raise TypeError("function takes exactly 7 arguments")
        self.calls.append(("compiled", arguments[:3], arguments[9:]))
        assert arguments[3:9] == (70, "function", "metadata", None, None, None)


class Kernel:
    """A Triton kernel: gives back what it compiled."""

    def __init__(self, calls: list[Any], compiled: Any) -> None:
        self.calls, self.compiled = calls, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(("binder", grid, arguments))
            self.options = options
            return self.compiled

        return call


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "current_stream", lambda device: 71 + device)


@pytest.mark.usefixtures("stream")
def test_the_launcher_leaves_the_binder_out_from_the_second_call_on() -> None:
    calls: list[Any] = []
    launch = Launcher(Kernel(calls, Compiled(calls)), 4)
    tensor, lr = torch.zeros(64), torch.zeros(())
    ready = [launch(3, [tensor], (64, lr), (True,), 64) for _ in range(2)]
    assert [call[0] for call in calls] == ["binder", "compiled"]
    assert calls[1] == ("compiled", (3, 1, 1), (tensor.data_ptr(), 64, lr.data_ptr(), True))
    # What was launched is given back, to be launched again.
    assert ready[0] is None and ready[1] is not None
    ready[1](5, 4096, 64, 8192, True)
    assert calls.pop() == ("compiled", (5, 1, 1), (4096, 64, 8192, True))
    # Other types, other constants, and pointers that are not aligned are other kernels; so are numbers of 64 bits.
    launch(3, [tensor.bfloat16()], (64, lr), (True,), 64)
    launch(3, [tensor], (64, lr.double()), (True,), 64)
    launch(3, [tensor], (64, lr), (False,), 64)
    for _ in range(2):
        launch(3, [tensor[1:]], (63, lr), (True,), 63)
        launch(3, [tensor], (2**31, lr), (True,), 2**31)
    assert [call[0] for call in calls[2:]] == ["binder"] * 7


def test_a_launcher_lets_the_compiler_contract_unless_told() -> None:
    for contracts in (True, False):
        kernel = Kernel([], None)
        Launcher(kernel, 4, contracts)(1, [torch.zeros(64)], (64,), (), 64)
        assert kernel.options == {"num_warps": 4, "enable_fp_fusion": contracts}


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("compiled", [None, "breaks"])
def test_the_launcher_stays_with_the_binder_where_it_must(compiled: str | None) -> None:
    calls: list[Any] = []
    launch = Launcher(Kernel(calls, compiled and Compiled(calls, breaks=True)), 4)
    for _ in range(3):
        launch(1, [torch.zeros(64)], (64,), (), 64)
    assert [call[0] for call in calls] == ["binder"] * 3


def test_every_rule_has_a_kernel() -> None:
    entries = [entry for entry in current().registry("optimizer kernel").entries() if entry.full_name.startswith("intarsia-kernels:")]
    assert {entry.op for entry in entries} == {"adamw_update", "adamw_quantised", "newton_schulz", "muon_directions", "muon_apply"}
    for entry in entries:
        assert set(entry.needs) - {"fp8"} == {"cuda", "triton"} and entry.priority > 0
        assert callable(getattr(updates, entry.op))
