"""Our kernels keep the promises of kernels."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from intarsia_testing.kernel import KernelConformance


class TestSDPA(KernelConformance):
    op, entry = "attention", "intarsia-kernels:sdpa"


class TestOneDNN(KernelConformance):
    op, entry = "linear", "intarsia-kernels:onednn"


class TestPlaced(KernelConformance):
    op, entry = "linear", "intarsia-kernels:placed"


if importlib.util.find_spec("triton"):

    @pytest.mark.parametrize(
        ("op", "entry"),
        [
            ("rms_norm", "triton"),
            ("cross_entropy", "cross_entropy/triton"),
            ("paged_attention", "paged_attention/split"),
        ],
    )
    def test_triton_kernels_under_the_interpreter(op: str, entry: str) -> None:
        """Where triton is installed its interpreter stands in for a GPU; without it, tests/unit/test_ops_select.py sees that the kernel is refused by name."""
        code = (
            "import sys; from intarsia_testing.kernel import check\n"
            "from tests.support import triton_interpreter; triton_interpreter.repair()\n"
            f"found = list(check({op!r}, 'intarsia-kernels:{entry}', present=('cuda', 'triton'), device='cpu'))\n"
            "print(*found, sep='\\n'); sys.exit(any(outcome != 'kept' for _, outcome, _ in found))"
        )
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        root = Path(__file__).parents[2]
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=root, timeout=600, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr
