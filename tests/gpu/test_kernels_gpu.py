"""Our GPU kernels keep the promises of kernels. Runs in the gpu session."""

from __future__ import annotations

import pytest
from intarsia_testing.kernel import KernelConformance

pytestmark = pytest.mark.gpu


class TestSDPAOnGPU(KernelConformance):
    op, entry, device = "attention", "intarsia-kernels:sdpa", "cuda"


class TestFlex(KernelConformance):
    op, entry = "attention", "intarsia-kernels:flex"


class TestVarlen(KernelConformance):
    op, entry = "attention", "intarsia-kernels:varlen"


class TestSegmentsVarlen(KernelConformance):
    op, entry = "segment_attention", "intarsia-kernels:segment_attention/varlen"


class TestTritonRMSNorm(KernelConformance):
    op, entry = "rms_norm", "intarsia-kernels:triton"


class TestTritonCrossEntropy(KernelConformance):
    op, entry = "cross_entropy", "intarsia-kernels:cross_entropy/triton"


class TestFloat8Linear(KernelConformance):
    op, entry = "scaled_linear", "intarsia-kernels:fp8"
