"""The kernels of the batch-invariant mode keep the promises of kernels, gradients against float64 among them."""

from __future__ import annotations

from intarsia_testing.kernel import KernelConformance


class TestLinear(KernelConformance):
    op, entry = "linear", "intarsia-kernels:linear/tiled"


class TestAttention(KernelConformance):
    op, entry = "attention", "intarsia-kernels:attention/tiled"


class TestSwiglu(KernelConformance):
    op, entry = "swiglu", "intarsia-kernels:swiglu/tiled"


class TestCrossEntropy(KernelConformance):
    op, entry = "cross_entropy", "intarsia-kernels:cross_entropy/tiled"


class TestGroupedLinear(KernelConformance):
    op, entry = "grouped_linear", "intarsia-kernels:grouped_linear/tiled"


class TestRouterLinear(KernelConformance):
    op, entry = "router_linear", "intarsia-kernels:router_linear/tiled"


class TestRouterSigmoid(KernelConformance):
    op, entry = "router_sigmoid", "intarsia-kernels:router_sigmoid/tiled"


class TestSigmoidGate(KernelConformance):
    op, entry = "sigmoid_gate", "intarsia-kernels:sigmoid_gate/tiled"
