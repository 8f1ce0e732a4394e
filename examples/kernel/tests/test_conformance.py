"""The kernel keeps the promises of kernels, and those that its entry declares."""

from __future__ import annotations

from intarsia_testing import KernelConformance


class TestLean(KernelConformance):
    op, entry = "swiglu", "acme-swiglu:lean"
