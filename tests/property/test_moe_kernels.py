"""Kernels for mixtures of experts under Triton's interpreter, which stands in for a GPU: the kit's promises, and what the kit cannot ask of the interpreter.

The interpreter needs its variable before Triton is imported, hence a process of its own: this file, run as a program.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

NEEDS_TRITON = pytest.mark.skipif(
    not importlib.util.find_spec("triton"),
    reason="Triton comes with CUDA builds of torch; `nox -s kernels` brings it, and tests/gpu has these kernels too",
)
PROMISED = (
    "permute:permute/triton",
    "combine:combine/triton",
    "swiglu:swiglu/triton",
    "scaled_grouped_linear:scaled_grouped_linear/grouped_mm",
)


@NEEDS_TRITON
@pytest.mark.parametrize("name", [*PROMISED, "products"])
def test_under_the_interpreter(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_float32_router_by_bfloat16_products() -> None:
    """Three parts add up to the weight, and the product is as near to float64 as float32's own; plain bfloat16 is a thousand times farther."""
    import torch
    from intarsia_models_common.moe.products import router_linear as reference

    spec = importlib.util.spec_from_file_location("router_kernel", _router_file())
    assert spec is not None and spec.loader is not None
    router = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(router)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 512, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(24, 512, generator=generator) / 20).requires_grad_()
    assert torch.equal(sum(part.double() for part in router.parts(weight.detach(), 3)).float(), weight.detach())
    wave = torch.randn(64, 24, generator=generator)
    exact = x.double() @ weight.double().t()
    found, plain = router.router_linear(x, weight), (x @ weight.bfloat16().t()).float()
    assert found.dtype == torch.float32
    own = float((reference(x, weight) - exact).abs().max())
    assert float((found - exact).abs().max()) <= 4 * own < 0.01 * float((plain - exact).abs().max())
    grad_x, grad_weight = torch.autograd.grad(found, (x, weight), wave)
    torch.testing.assert_close(grad_weight.double(), wave.double().t() @ x.detach().double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_x.double(), wave.double() @ weight.detach().double(), rtol=1e-2, atol=1e-2)


def _router_file() -> str:
    import intarsia_kernels

    return os.path.join(os.path.dirname(intarsia_kernels.__file__), "moe", "router.py")


def check_promises(op: str, entry: str) -> None:
    from intarsia_testing.kernel import check

    found = list(check(op, f"intarsia-kernels:{entry}", present=("cuda", "triton", "sm90"), device="cpu"))
    problems = [each for each in found if each[1] != "kept"]
    assert not problems, problems


def check_products() -> None:
    """Every case of the kit in float32, which the kernel takes on a CPU, with memory full of NaN where nobody has written."""
    import torch
    from intarsia_kernels.moe import products
    from intarsia_models_common.moe.operators import GROUPED_LINEAR
    from intarsia_testing.kernel import poisoned, run
    from intarsia_testing.kernel_cases import cases

    taken = 0
    for case in cases("grouped_linear"):
        arguments = case.arguments(torch.float32, "cpu")
        if products.supports(**arguments) is not None:
            continue
        taken += 1
        with poisoned():
            found = run(products.grouped_linear, arguments, "grouped_linear")
        wanted = run(GROUPED_LINEAR.reference, case.arguments(torch.float64, "cpu", torch.float32), "grouped_linear")
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name].double(), value, rtol=2e-5, atol=2e-5, msg=lambda text, where=(case.label, name): f"{where}: {text}"
            )
    assert taken >= 4
    for groups, programs in ((1, 3), (3, 1)):  # A product that leaves its memory as it was.
        rubbish = torch.full((37, 8), torch.nan)
        offsets = torch.tensor([20] * groups, dtype=torch.int32)
        products._clear_tail[(programs, 1)](rubbish, offsets, groups, 37, 8, ROWS=16, BLOCK=16)
        assert rubbish[:20].isnan().all() and not rubbish[20:].any()
    for programs in (1, 2, 3):
        gradients = torch.full((3, 5, 4), torch.nan)
        products._clear_empty[(3, programs)](gradients, torch.tensor([0, 2, 2], dtype=torch.int32), 20, BLOCK=16)
        assert gradients[1].isnan().all() and not gradients[[0, 2]].any()


if __name__ == "__main__":
    if sys.argv[1] == "products":
        check_products()
    else:
        check_promises(*sys.argv[1].split(":"))
