"""Float8 kernels under Triton's interpreter, which stands in for a GPU: quantising is bit for bit the reference's, products are those of what the bytes stand for.

The interpreter needs its variable before Triton is imported, hence a process of its own: this file, run as a program.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest


@pytest.mark.skipif(
    not importlib.util.find_spec("triton"),
    reason="Triton comes with CUDA builds of torch; `nox -s kernels` brings it, and tests/gpu has these kernels too",
)
def test_kernels_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def mend_the_interpreter() -> None:
    """Let torch convert floats: Triton 3.6's interpreter loses the carry of a mantissa that is rounded up."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {tl.float8e4nv: torch.float8_e4m3fn, tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32}
    signed: dict[int, tuple[Any, Any]] = {8: (np.uint8, torch.uint8), 16: (np.int16, torch.int16), 32: (np.int32, torch.int32)}

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        source, target = source.scalar, target.scalar
        bits = torch.from_numpy(np.ascontiguousarray(values).view(signed[source.primitive_bitwidth][0]).copy())
        found = bits.view(dtypes[source]).to(dtypes[target]).view(signed[target.primitive_bitwidth][1]).numpy()
        return found.view(getattr(np, f"uint{target.primitive_bitwidth}")).reshape(np.shape(values))

    interpreter._convert_float = convert


def check_tiles() -> None:
    """Random boxes of a shard, in random order and dtypes; values at the edges of the format among them."""
    import torch
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from intarsia_flexshard import tiles as references
    from intarsia_kernels.fp8 import tiles

    sizes = st.integers(1, 19)

    @settings(max_examples=25, deadline=None, database=None)
    @given(
        st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5), st.tuples(sizes, sizes), st.booleans(), st.integers(0, 2**20), st.data()
    )
    def quantise(shapes: Any, tile: Any, power_of_two: bool, seed: int, data: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)))
        boxes, value, payload, scale = [], 3, 5, 0
        elements = sum(rows * columns for rows, columns in shapes)
        first = (elements + 5) // 4 + 1
        for rows, columns in shapes:
            boxes.append((value, payload, first + scale, rows, columns))
            value, payload = value + rows * columns, payload + rows * columns
            scale += -(-rows // tile[0]) * -(-columns // tile[1])
        values = torch.randn(value, generator=generator) * 10.0 ** torch.randint(-14, 8, (value,), generator=generator)
        values *= data.draw(st.sampled_from((1.0, 1.0, 1e-20, 0.0)))
        values[torch.randint(0, value, (2,), generator=generator)] = data.draw(
            st.sampled_from((0.0, 0.0, float("nan"), float("inf"), 448.0))
        )
        wires = [torch.full((4 * (first + scale) + 3,), 77, dtype=torch.uint8) for _ in range(2)]
        for function, wire in zip((references.quantise_tiles, tiles.quantise_tiles), wires, strict=True):
            function(values.to(dtype), wire, tuple(boxes), tile, power_of_two, torch.bfloat16)
        # A NaN has many bit patterns: scales are compared as numbers, payloads too.
        split = 4 * first
        assert torch.equal(*(wire[:5] for wire in wires)) and torch.equal(*(wire[-3:] for wire in wires))
        for part, kind in ((slice(5, 5 + elements), torch.float8_e4m3fn), (slice(split, split + 4 * scale), torch.float32)):
            one, other = (wire[part].view(kind).float() for wire in wires)
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)

    @settings(max_examples=15, deadline=None, database=None)
    @given(sizes, sizes, st.integers(0, 3), st.tuples(sizes, sizes), st.integers(0, 2**20))
    def dequantise(rows: int, columns: int, stack: int, tile: Any, seed: int) -> None:
        from intarsia_float8.format import quantise as whole

        generator = torch.Generator().manual_seed(seed)
        shape = (stack, rows, columns) if stack else (rows, columns)
        payload, scales = whole(torch.randn(shape, generator=generator), tile)
        wanted, found = (torch.full((*shape[:-2], rows + 2, columns + 3), 9.0, dtype=torch.bfloat16) for _ in range(2))
        inner = (..., slice(1, rows + 1), slice(2, columns + 2))
        references.dequantise_tiles(payload, scales, tile, wanted[inner])
        tiles.dequantise_tiles(payload, scales, tile, found[inner])
        assert torch.equal(wanted, found)

    quantise()
    dequantise()


def check_whole_tiles() -> None:
    """Boxes of whole tiles, and others beside them."""
    import torch
    from intarsia_flexshard import tiles as references
    from intarsia_kernels.fp8 import tiles

    boxes = ((0, 0, 700, 32, 64), (2048, 2048, 720, 16, 32), (2560, 2560, 724, 5, 16), (2640, 2640, 726, 16, 16))
    whole, others = tiles.tables(boxes, (16, 16), torch.device("cpu"))
    assert whole is not None and others is not None and (whole.boxes, whole.tiles, others.boxes) == (3, 11, 1)
    values, wires = (
        torch.randn(2896, generator=torch.Generator().manual_seed(0)),
        [torch.zeros(4 * 730, dtype=torch.uint8) for _ in range(2)],
    )
    for function, wire in zip((references.quantise_tiles, tiles.quantise_tiles), wires, strict=True):
        function(values, wire, boxes, (16, 16), False, torch.bfloat16)
    assert torch.equal(*wires)


def check_update() -> None:
    """AdamW that quantises gives the masters, the state and the wire of AdamW and of quantising behind it; what is in no box stays."""
    import torch
    from intarsia.parameters import split_master
    from intarsia_kernels.fp8 import tiles
    from intarsia_kernels.optimizer.adamw import fused_adamw
    from intarsia_kernels.optimizer.quantised_adamw import adamw_quantised

    boxes, size = ((0, 0, 400, 32, 32), (1024, 1024, 404, 16, 32)), 1536 + 64
    for is_split, power_of_two in ((True, False), (False, True)):
        found = []
        for fused in (False, True):
            generator = torch.Generator().manual_seed(0)
            value, mean, gradient = (torch.randn(size, generator=generator) for _ in range(3))
            square, low = torch.rand(size, generator=generator), None
            if is_split:
                master, value, low = value, value.bfloat16(), torch.empty(size, dtype=torch.int16)
                split_master(master, value, low)
            before, wire = value.clone(), torch.zeros(4 * 420, dtype=torch.uint8)
            given = (value, low, mean, square, gradient, torch.tensor(3.0), 1e-2, (0.9, 0.95), 1e-8, 0.1)
            if fused:
                assert adamw_quantised.supports(*given, wire, boxes, (16, 16), power_of_two, torch.bfloat16) is None
                adamw_quantised(*given, wire, boxes, (16, 16), power_of_two, torch.bfloat16)
                assert torch.equal(value[1536:], before[1536:]) and not torch.equal(value[:1536], before[:1536])
            else:
                fused_adamw(*given)
                tiles.quantise_tiles(value, wire, boxes, (16, 16), power_of_two, torch.bfloat16)
            found.append([wire, *(tensor[:1536] for tensor in (value, mean, square, low) if tensor is not None)])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), is_split


def check_rows_and_products() -> None:
    """Activations by pieces of rows; products by every configuration."""
    import torch
    from intarsia_float8.format import dequantise, quantise
    from intarsia_kernels.fp8 import products, tiles

    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 128), (30, 300), (33, 256)):
        x = torch.randn(rows, columns, generator=generator)
        payload, scales = tiles.quantise_rows(x)
        wanted, wanted_scales = quantise(x, (1, 128))
        assert torch.equal(payload[:rows].view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(scales[:, :rows].t(), wanted_scales)
        assert payload.shape[0] % 4 == 0 and not payload[rows:].float().any()
        tiled = torch.randn(-(-payload.shape[0] // 128), -(-columns // 128), generator=generator)
        turned, turned_scales = tiles.transpose(payload, tiled)
        assert torch.equal(turned.view(torch.uint8), payload.view(torch.uint8).t()) and turned.is_contiguous()
        assert torch.equal(turned_scales, tiled.t()) and turned_scales.is_contiguous()
    x, weight = torch.randn(70, 256, generator=generator), torch.randn(384, 256, generator=generator)
    (x8, x_scales), (payload, scales) = tiles.quantise_rows(x), quantise(weight, (128, 128))
    exact = dequantise(x8, x_scales.t(), (1, 128), torch.float64)[:70] @ dequantise(payload, scales, (128, 128), torch.float64).t()
    for config in products.CONFIGS:
        y = products.triton_product(x8, x_scales, payload, scales, torch.float32, 70, config)
        assert float((y - exact).norm() / exact.norm()) < 1e-6, config


def check_conformance() -> None:
    """The kernel of the operator keeps its promises."""
    from intarsia_testing.kernel import check

    found = list(check("scaled_linear", "intarsia-kernels:fp8", present=("cuda", "sm90", "triton"), device="cpu"))
    broken = [line for line in found if line[1] != "kept"]
    assert found and not broken, broken


def check_compiled() -> None:
    """A compiler traces the layer without a break, and quantises an activation that three layers read once."""
    import torch
    from intarsia_float8.format import quantise
    from intarsia_kernels.fp8.linear import scaled_linear
    from torch import Tensor
    from torch._dynamo.testing import AotEagerAndRecordGraphs

    narrow = [quantise(torch.randn(128, 256), (128, 128)) for _ in range(3)]
    handles = [torch.zeros(()).expand(128, 256).detach().requires_grad_() for _ in range(3)]
    x, bias = torch.randn(2, 5, 256, requires_grad=True), torch.randn(128, requires_grad=True)

    def layers(x: Tensor, handles: Any, narrow: Any) -> Tensor:
        return sum(scaled_linear(x, handle, payload, scales, bias) for handle, (payload, scales) in zip(handles, narrow, strict=True))

    backend = AotEagerAndRecordGraphs()
    compiled = torch.compile(layers, fullgraph=True, backend=backend)
    found, wanted = (torch.autograd.grad(run(x, handles, narrow).square().sum(), [x, *handles, bias]) for run in (compiled, layers))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    graphs = [*backend.fw_graphs, *backend.bw_graphs]
    assert [sum("quantise_rows" in str(node.target) for node in graph.graph.nodes) for graph in graphs] == [1, 1]


def check_shared() -> None:
    """Layers that read one activation quantise it once, also without a compiler; what has changed is quantised again, and nothing outlives its activation."""
    import torch
    from intarsia_float8.format import quantise
    from intarsia_kernels.fp8 import linear

    calls, quantise_rows = [], linear.quantise_rows
    linear.quantise_rows = lambda x: calls.append(x.shape) or quantise_rows(x)  # type: ignore[assignment, func-returns-value]
    payload, scales = quantise(torch.randn(128, 256), (128, 128))
    handle, x = torch.zeros(()).expand(128, 256), torch.randn(2, 4, 256)
    one, other = (linear.scaled_linear(x, handle, payload, scales) for _ in range(2))
    assert len(calls) == 1 and torch.equal(one, other)
    x.mul_(2)
    torch.testing.assert_close(linear.scaled_linear(x, handle, payload, scales), 2 * one)
    assert len(calls) == 2
    with torch.inference_mode():
        inside = torch.randn(4, 256)
        linear.scaled_linear(inside, handle, payload, scales)
    assert len(calls) == 3 and linear._shared._found is not None
    del x
    assert linear._shared._found is None
    linear.quantise_rows = quantise_rows


if __name__ == "__main__":
    mend_the_interpreter()
    check_tiles()
    check_whole_tiles()
    check_update()
    check_rows_and_products()
    check_conformance()
    check_compiled()
    check_shared()
