"""Optimizer kernels under Triton's interpreter, which stands in for a GPU: sums bit for bit the reference's, updates its numbers, split masters exactly split.

The interpreter needs its variable before Triton is imported, hence a process of its own: this file, run as a program.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
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


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="see above")
def test_adamw_leaves_no_rounding_to_the_compiler() -> None:
    """In a process of its own too: Triton's variables may be set in this one. Needs no GPU, only its compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, "compile"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def check_compiled() -> None:
    """What the assembler gets, for a gradient that is added and for contributions: every product and sum says how it is rounded, so that the assembler makes no two of them one; and the
    operations on floats are the same but for adding contributions."""
    import re
    from collections import Counter

    import triton
    from intarsia_kernels.optimizer import adamw, quantised_adamw
    from intarsia_kernels.optimizer import sum as sums
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    flat = {"BLOCK": 2048, "CONTIGUOUS": 4, "EVICT": ""}
    update = {"SPLIT": True, "LOADED": False}
    tiles = {"TILE_O": 128, "TILE_I": 128, "ROWS": 32, "STAGES": 1, "BOXES": 1, "COMPUTE": triton.language.bfloat16}
    tiles |= {"LARGEST": 448.0, "SMALLEST": 2.0**-100, "POWER_OF_TWO": False}
    types = {"value": "*bf16", "low": "*i16", "mean": "*fp32", "square": "*fp32", "out": "*fp32", "payload": "*fp8e4nv", "scales": "*fp32"}
    types |= {"table": "*i64", "boxes": "i32", "n": "i32", "step": "*fp32"}
    for launch, constants in ((sums._launch, flat), (adamw._launch, update | flat), (quantised_adamw._launch, update | tiles)):
        kernel, found = launch._kernel, []
        for parts, pointer in ((1, "*fp32"), (1, "*bf16"), (2, "*bf16")):
            signature = {name: types.get(name, pointer if name[0] == "p" else "fp32") for name in kernel.arg_names}
            given = {**constants, "PARTS": parts}
            signature |= dict.fromkeys(given, "constexpr")
            source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in given.items()})
            text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(launch._options)).asm["ptx"]
            operations = Counter(re.findall(r"\b(?:add|sub|mul|fma|div|sqrt|rsqrt|ex2)\.[a-z.]*f32\b", text))
            loose = [name for name in operations if re.match(r"(add|sub|mul|fma)\.(?!rn\.)", name)]
            assert operations["mul.rn.f32"] and not loose, (kernel, loose)
            found.append(operations)
        assert found[0] == found[1] and set(found[2] - found[1]) == {"add.rn.f32"}, kernel


def drawn(generator: Any, size: int, dtype: Any, offset: int = 0) -> Any:
    """Normal numbers; `offset` elements into their storage, so that they are not aligned."""
    import torch

    return torch.randn(size + offset, generator=generator).to(dtype)[offset:]


def check_sums() -> None:
    """Any number of contributions, sizes around a block's, narrow and wide, aligned and not."""
    import torch
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from intarsia_kernels.optimizer import reference
    from intarsia_kernels.optimizer.sum import add_parts, prepare_add

    floats = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])

    @settings(max_examples=30, deadline=None, database=None)
    @given(st.sampled_from([0, 1, 15, 300, 2048, 5000]), st.integers(1, 17), floats, floats, st.integers(0, 3), st.sampled_from([1.0, 0.3]))
    def sums(size: int, count: int, dtype: Any, into: Any, offset: int, scale: float) -> None:
        generator = torch.Generator().manual_seed(size + count)
        parts = [drawn(generator, size, dtype, offset) for _ in range(count)]
        found, expected = torch.full((size,), math.nan, dtype=into), torch.empty(size, dtype=into)
        add_parts(parts, found, scale)
        reference.add_parts(parts, expected, scale)
        assert torch.equal(found, expected)
        prepared = prepare_add(parts, scale)
        for _ in range(3):
            again = torch.full((size,), math.nan, dtype=into)
            prepared(again)
            assert torch.equal(again, expected)

    sums()
    wide = torch.empty(3, dtype=torch.float64)
    add_parts([torch.ones(3, dtype=torch.float64)] * 2, wide, 0.5)
    assert torch.equal(wide, torch.ones(3, dtype=torch.float64))


def check_adamw() -> None:
    """Every storage, early steps and late ones, learning rates as numbers and as tensors."""
    import torch
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from intarsia.parameters import join_master, split_master
    from intarsia_kernels.optimizer.adamw import fused_adamw
    from intarsia_optimizers.updates import adamw_update

    @settings(max_examples=30, deadline=None, database=None)
    @given(
        st.sampled_from([0, 1, 300, 2048, 4100]),
        st.sampled_from(["float32", "bfloat16", "split"]),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.sampled_from([1.0, 2.0, 700.0, 1e6]),
        st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.9, 0.9999)]),
        st.booleans(),
    )
    def updates(size: int, storage: str, state: Any, of_gradient: Any, step: float, betas: Any, loaded: bool) -> None:
        generator = torch.Generator().manual_seed(size)
        master, gradient = drawn(generator, size, torch.float32), drawn(generator, size, of_gradient)
        mean, square = drawn(generator, size, state), drawn(generator, size, state).abs()
        lr = torch.tensor(0.03, dtype=torch.float64) if loaded else 0.03
        results = []
        for update in (fused_adamw, adamw_update):
            low = None
            value = master.clone() if storage == "float32" else master.bfloat16()
            if storage == "split":
                low = torch.empty(size, dtype=torch.int16)
                split_master(master, value, low)
            states = mean.clone(), square.clone()
            update(value, low, *states, gradient, torch.tensor(step), lr, betas, 1e-8, 0.1)
            results.append([value.float() if low is None else join_master(value, low), *states])
            if low is not None:
                high, rest = torch.empty_like(value), torch.empty_like(low)
                split_master(results[-1][0], high, rest)
                assert torch.equal(high, value) and torch.equal(rest, low)
        # One unit in the last place of what is stored.
        for found, expected, narrow in zip(*results, (storage == "bfloat16", *[state == torch.bfloat16] * 2), strict=True):
            torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7 if narrow else 2e-6, atol=2e-6 if not narrow else 2e-5)

    updates()
    check_contributions()
    # Nothing but the roundings of a split: half-way cases of both parities, the largest numbers, infinities, the smallest, NaN.
    bits = [0x3F808000, 0x3F818000, -0x407F8000, 0x7F7FFFFF, 0x7F800000, -0x00800000, 1, 0, 0x7FC00001, 0x3F807FFF, 0x3F808001]
    master = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    high, low = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    split_master(master, high, low)
    before = join_master(high, low)
    zeros = torch.zeros(len(bits))
    fused_adamw(high, low, zeros.clone(), zeros.clone(), zeros, torch.tensor(1.0), 0.0, (0.9, 0.999), 1e-8, 0.0)
    after = join_master(high, low)
    assert torch.equal(after.isnan(), before.isnan()) and torch.equal(after[~after.isnan()], before[~before.isnan()])


def check_contributions() -> None:
    """A gradient that is still to be added: the bits of adding it first, with quantising and without."""
    import torch
    from intarsia.parameters import split_master
    from intarsia_kernels.optimizer.adamw import fused_adamw, supports
    from intarsia_kernels.optimizer.quantised_adamw import adamw_quantised
    from intarsia_kernels.optimizer.sum import add_parts

    size, boxes = 4000, ((16, 0, 500, 32, 32),)
    cases = ((1, torch.float32, 0.5), (2, torch.bfloat16, 1 / 3), (3, torch.bfloat16, 1 / 6), (8, torch.float16, 0.5))
    for count, dtype, scale in cases:
        generator = torch.Generator().manual_seed(count)
        parts = [drawn(generator, size, dtype) for _ in range(count)]
        gradient = torch.empty(size)
        add_parts(parts, gradient, scale)
        results = []
        for given in (gradient, (parts, scale)):
            generator.manual_seed(0)
            value, low = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.int16)
            split_master(drawn(generator, size, torch.float32), value, low)
            mean, square = drawn(generator, size, torch.float32), drawn(generator, size, torch.float32).abs()
            wire = torch.zeros(2048, dtype=torch.uint8)
            update = (value, low, mean, square, given, torch.tensor(3.0), 1e-2, (0.9, 0.95), 1e-8, 0.1)
            assert supports(*update) is None
            fused_adamw(*update)
            adamw_quantised(*update, wire, boxes, (16, 16), False, torch.bfloat16)
            results.append((value, low, mean, square, wire))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True)), count
    assert "9 contributions" in (supports(*update[:4], ([gradient] * 9, 0.5), *update[5:]) or "")


def check_muon() -> None:
    """Lists of unequal sizes, every storage."""
    import torch
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from intarsia.parameters import join_master, split_master
    from intarsia_kernels.optimizer import muon
    from intarsia_optimizers.updates import muon_apply, muon_directions

    lists = st.sampled_from([[300] * 11, [1, 1, 4100, 64], [2048], [0, 5]])

    @settings(max_examples=20, deadline=None, database=None)
    @given(lists, st.booleans(), st.booleans(), st.sampled_from([torch.bfloat16, torch.float32]))
    def directions(sizes: list[int], nesterov: bool, narrow: bool, into: Any) -> None:
        generator = torch.Generator().manual_seed(len(sizes))
        momenta = [drawn(generator, size, torch.bfloat16 if narrow else torch.float32) for size in sizes]
        gradients = [drawn(generator, size, torch.float32) for size in sizes]
        results = []
        for rule in (muon.directions, muon_directions):
            kept, out = [each.clone() for each in momenta], [torch.full((size,), math.nan, dtype=into) for size in sizes]
            squares = rule(kept, gradients, out, 0.95, nesterov)
            results.append((torch.cat(kept).float(), torch.cat(out).float()))
            if squares is not None:
                torch.testing.assert_close(squares, torch.stack([each.float().square().sum() for each in out]), rtol=1e-5, atol=1e-6)
        for found, expected, is_narrow in zip(*results, (narrow, into == torch.bfloat16), strict=True):
            torch.testing.assert_close(found, expected, rtol=2**-7 if is_narrow else 1e-5, atol=1e-6)

    @settings(max_examples=20, deadline=None, database=None)
    @given(lists, st.booleans(), st.booleans(), st.sampled_from([torch.float16, torch.float32]))
    def applied(sizes: list[int], split: bool, loaded: bool, of_update: Any) -> None:
        generator = torch.Generator().manual_seed(len(sizes))
        masters, moves = ([drawn(generator, size, dtype) for size in sizes] for dtype in (torch.float32, of_update))
        lr = torch.tensor(0.02) if loaded else 0.02
        results = []
        for rule in (muon.apply, muon_apply):
            values, lows = [each.bfloat16() if split else each.clone() for each in masters], None
            if split:
                lows = [torch.empty(size, dtype=torch.int16) for size in sizes]
                for master, value, low in zip(masters, values, lows, strict=True):
                    split_master(master, value, low)
            rule(values, lows, [each.clone() for each in moves], lr, 1.3, 0.1)
            results.append(torch.cat(values if lows is None else list(map(join_master, values, lows))))
        torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)

    directions()
    applied()


def check_products() -> None:
    """Tiles of both widths with all that a product can be given; matrices by their norms."""
    import torch
    from intarsia_kernels.optimizer import reference, scale, tiles

    generator = torch.Generator().manual_seed(5)
    s = drawn(generator, 2 * 512 * 512, torch.float16).view(2, 512, 512)
    s = (s + s.mT).contiguous()
    for transposed in (False, True):
        x = drawn(generator, 2 * 64 * 512, torch.float16).view((2, 64, 512) if transposed else (2, 512, 64))
        for columns, warps in ((128, 4), (256, 8)):
            for addends, gamma in (([], 0.0), ([(s, 0.25)], 3.0), ([(s, 0.25), (s, 0.5)], 0.0)):
                results = []
                factors, dropped = (torch.tensor([0.5, 1.7]), 2) if len(addends) != 1 else (None, 0)
                for product, options in ((tiles.product, {"columns": columns, "stages": 3, "warps": warps}), (None, {})):
                    out, lost = torch.full_like(s, math.nan), torch.full_like(s, math.nan)
                    if product is None:
                        reference.symmetric_product(
                            x,
                            x,
                            out,
                            transposed=transposed,
                            alpha=0.5,
                            addends=addends,
                            gamma=gamma,
                            lost_BMM=lost,
                            factors_B=factors,
                            dropped=dropped,
                        )
                    else:
                        product(x, x, out, transposed, 0.5, addends, gamma, lost, factors, dropped, **options)
                        assert not dropped or not (out.view(torch.int16) & 3)[out.abs() > 1e-4].any()
                    results.append((out, out.double() + lost.double() / reference.LOST))
                torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3 * 2**dropped, atol=1e-3)
                torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=1e-5)
    whole = s.clone()
    tiles.mirror(whole, 256)
    assert torch.equal(whole, s)
    scale.PARTS = 8
    for shape, dtype in (((2, 33, 50), torch.bfloat16), ((3, 100, 300), torch.float32), ((1, 7, 3), torch.float16)):
        matrices = drawn(generator, math.prod(shape), dtype).view(shape)
        matrices[0] *= 1e-3
        out = torch.full(shape, math.nan, dtype=torch.float16)
        factors = torch.full(shape[:1], math.nan)
        scale.normalised(matrices, out, factors, 256.0, 1e-7)
        norms = matrices.float().norm(dim=(1, 2))
        powers = torch.exp2(torch.floor(torch.log2(norms)) + 1)
        torch.testing.assert_close(factors, powers / norms)
        assert torch.equal(out, (matrices.float() * (256.0 / powers[:, None, None])).half())
        again, of_norms = torch.full_like(out, math.nan), torch.full_like(factors, math.nan)
        scale.normalised(matrices, again, of_norms, 256.0, 1e-7, norms.square())
        assert torch.equal(again, out)
        torch.testing.assert_close(of_norms, factors)


def check_signatures() -> None:
    """Kernels take what the rules take."""
    from intarsia.plugins import current
    from intarsia_optimizers import updates

    plugins = current()
    for entry in plugins.registry("optimizer kernel").entries():
        if entry.full_name.startswith("intarsia-kernels:"):
            positional = [
                name
                for name, parameter in inspect.signature(plugins.target(entry)).parameters.items()
                if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
            ]
            assert positional == list(inspect.signature(getattr(updates, entry.op)).parameters), entry.full_name


if __name__ == "__main__" and sys.argv[1:] == ["compile"]:
    check_compiled()
elif __name__ == "__main__":
    from test_fp8_kernels import mend_the_interpreter

    mend_the_interpreter()
    check_signatures()
    check_sums()
    check_adamw()
    check_muon()
    check_products()
