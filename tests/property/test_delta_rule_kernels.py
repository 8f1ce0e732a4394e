"""Kernels of linear attention under Triton's interpreter, which stands in for a GPU: the kit's promises, random packings, and equal bits however many programs share the work.

The interpreter needs its variable before Triton is imported, hence a process of its own: this file, run as a program.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NEEDS_TRITON = pytest.mark.skipif(
    not importlib.util.find_spec("triton"),
    reason="Triton comes with CUDA builds of torch; `nox -s kernels` brings it, and tests/gpu has these kernels too",
)
PROMISED = ("gated_delta_rule:gated_delta_rule/triton", "short_conv:short_conv/triton")
SHARED = 228 * 1024
"""Bytes of shared memory of a multiprocessor of compute capability 9.0, of which each program needs 1,024 more than it says."""


@NEEDS_TRITON
@pytest.mark.parametrize("name", [*PROMISED, "random", "separate", "halves", "programs", "convolutions"])
def test_under_the_interpreter(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@NEEDS_TRITON
@pytest.mark.parametrize("name", ["compiled", "turned", "wide_numbers"])
def test_by_the_compiler_alone(name: str) -> None:
    """Needs no GPU: states go through tensor cores and programs fit; numbers in float64 are narrowed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def check_promises(op: str, entry: str) -> None:
    from intarsia_testing.kernel import check

    found = list(check(op, f"intarsia-kernels:{entry}", present=("cuda", "triton", "sm80"), device="cpu"))
    problems = [each for each in found if each[1] != "kept"]
    assert not problems, problems


def documents_of(*rows: tuple[int, ...]) -> Any:
    import torch

    return torch.stack([torch.cat([torch.full((n,), i % 3) for i, n in enumerate(row)]) for row in rows])


def call(
    rows: int, tokens: int, heads: int = 1, keys: int = 64, values: int = 64, *, state: bool = False, decay: float = 0.3, seed: int = 0
) -> dict[str, Any]:
    """Inputs by name, float64."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = {
        "q_BSHK": normal(rows, tokens, heads, keys),
        "k_BSHK": normal(rows, tokens, heads, keys),
        "v_BSHV": normal(rows, tokens, heads, values),
        "decay_BSH": -decay * normal(rows, tokens, heads).abs(),
        "beta_BSH": normal(rows, tokens, heads).sigmoid(),
    }
    return {**made, "state_BHKV": normal(rows, heads, keys, values)} if state else made


def results(function: Any, inputs: dict[str, Any], dtype: Any, wide: Any = None, **fixed: Any) -> dict[str, Any]:
    """Outputs and gradients by name; numbers are rounded to `dtype` (decays, beta and states to float32) and computed with in `wide`."""
    import torch
    from intarsia_testing.kernel import run

    rounded = {name: x.to(dtype if name[0] in "qkvxw" else torch.float32) for name, x in inputs.items()}
    leaves = {name: x.to(wide or x.dtype).requires_grad_() for name, x in rounded.items()}
    return run(function, {**leaves, **fixed}, "")


def compare(found: dict[str, Any], exact: dict[str, Any], bound: float, where: Any) -> None:
    for name, value in exact.items():
        error = float((found[name].double() - value.double()).abs().max()) / (float(value.abs().max()) or 1.0)
        assert error <= bound, (where, name, error)


@contextlib.contextmanager
def cut(chunk: int, multiprocessors: int = 3) -> Iterator[None]:
    """Chunks of `chunk` tokens, and so many multiprocessors."""
    import dataclasses

    from intarsia_kernels.delta_rule import rule, settings

    before = rule.multiprocessors
    try:
        settings._measured.update({width: dataclasses.replace(settings.WIDE[width], chunk=chunk) for width in settings.WIDTHS})
        rule.multiprocessors = lambda _: multiprocessors
        yield
    finally:
        settings._measured.clear()
        rule.multiprocessors = before


def check_random() -> None:
    """Any packing, counts, states that enter, widths, decays, both sizes of chunks."""
    import torch
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from intarsia_kernels.delta_rule.rule import gated_delta_rule
    from intarsia_models_common.linear_attention.delta_rule import gated_delta_rule as reference

    @settings(max_examples=25, deadline=None, database=None)
    @given(st.data())
    def random(data: Any) -> None:
        rows, tokens = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 31, 32, 33, 64, 65, 130]))
        fixed: dict[str, Any] = {"scale": 0.2, "normalise": data.draw(st.booleans()), "recompute": data.draw(st.booleans())}
        if data.draw(st.booleans()):
            begins = torch.tensor([[data.draw(st.integers(0, 19)) == 0 for _ in range(tokens)] for _ in range(rows)])
            whole = data.draw(st.sampled_from([None, 32, 64]))  # Documents that begin where chunks do.
            if whole:
                begins[:, ::whole] = True
            fixed["documents_BS"] = begins.long().cumsum(1) % 3
        if data.draw(st.booleans()):
            fixed["counts_B"] = torch.tensor([data.draw(st.integers(0, tokens)) for _ in range(rows)])
        keys, values = data.draw(st.sampled_from([(64, 64), (64, 128), (128, 64)]))
        decay, state, heads = data.draw(st.sampled_from([0.01, 0.5, 20.0])), data.draw(st.booleans()), data.draw(st.integers(1, 2))
        inputs = call(rows, tokens, heads, keys, values, state=state, decay=decay, seed=data.draw(st.integers(0, 9)))
        if not fixed["normalise"]:
            inputs["k_BSHK"] /= inputs["k_BSHK"].norm(dim=-1, keepdim=True)
        exact = results(reference, inputs, torch.float32, torch.float64, **fixed)
        with cut(data.draw(st.sampled_from([32, 64])), data.draw(st.sampled_from([1, 3, 100]))):
            compare(results(gated_delta_rule, inputs, torch.float32, **fixed), exact, 5e-5, fixed)

    random()


def check_separate() -> None:
    """What is packed gives what it gives alone, and a row that is cut gives what it gives whole: outputs and every gradient."""
    import torch
    from intarsia_kernels.delta_rule.rule import gated_delta_rule

    # Documents that begin and end within chunks, at chunks' borders, and one in whose last chunk another goes on.
    lengths = (40, 30, 26, 1, 1, 100, 5)
    inputs = call(1, sum(lengths), 2, 64, 64, decay=0.01)
    fixed = {"scale": 0.125, "normalise": True}
    packed = {name: x.float().requires_grad_() for name, x in inputs.items()}
    wave = torch.cos(torch.arange(sum(lengths) * 128) * 0.7).view(1, -1, 2, 64)
    y, final = gated_delta_rule(**packed, documents_BS=documents_of(lengths), **fixed)
    (y * wave).sum().backward()
    start = 0
    for length in lengths:
        at = slice(start, start + length)
        alone = {name: x[:, at].float().requires_grad_() for name, x in inputs.items()}
        y_alone, last = gated_delta_rule(**alone, **fixed)
        (y_alone * wave[:, at]).sum().backward()
        torch.testing.assert_close(y[:, at], y_alone, rtol=0, atol=2e-6)
        for name, x in alone.items():
            torch.testing.assert_close(
                packed[name].grad[:, at], x.grad, rtol=0, atol=3e-5, msg=lambda text, where=(name, length): f"{where}: {text}"
            )
        start += length
    torch.testing.assert_close(final, last, rtol=0, atol=2e-6)
    whole, _ = gated_delta_rule(**{name: x.float() for name, x in inputs.items()}, **fixed)
    first, state = gated_delta_rule(**{name: x[:, :70].float() for name, x in inputs.items()}, **fixed)
    rest, _ = gated_delta_rule(**{name: x[:, 70:].float() for name, x in inputs.items()}, state_BHKV=state, **fixed)
    torch.testing.assert_close(torch.cat((first, rest), 1), whole, rtol=0, atol=2e-6)


def check_halves() -> None:
    """16-bit inputs: within the declared bounds on every case of the kit, bfloat16 included, which the kit does not ask of the interpreter."""
    import torch
    from intarsia import ops
    from intarsia_kernels.delta_rule import plugin, rule, short_conv
    from intarsia_testing.kernel import run
    from intarsia_testing.kernel_cases import cases

    bounds = {entry.name: entry.bounds for entry in plugin.offer_kernels()}
    for op, function in (("gated_delta_rule", rule.gated_delta_rule), ("short_conv", short_conv.short_conv)):
        for dtype in (torch.bfloat16, torch.float16):
            for case in cases(op):
                arguments = case.arguments(dtype, "cpu")
                if function.supports(**arguments) is None:
                    exact = run(ops.operators()[op].reference, case.arguments(torch.float64, "cpu", dtype), op)
                    bound = bounds[f"{op}/triton"][f"*@{str(dtype).removeprefix('torch.')}"]
                    compare(run(function, arguments, op), exact, bound, (case.label, dtype))


def check_programs() -> None:
    """The same bits however many programs there are, twice, and where states are computed again."""
    import torch
    from intarsia_kernels.delta_rule.rule import gated_delta_rule

    inputs = call(2, 150, 2, 64, 64, state=True)
    fixed = {"scale": 0.125, "normalise": True, "documents_BS": documents_of((150,), (40, 24, 1, 1, 30, 54))}
    found = []
    for multiprocessors, recompute in ((3, False), (3, False), (1, True), (100, False)):
        with cut(32, multiprocessors):
            found.append(results(gated_delta_rule, inputs, torch.float32, recompute=recompute, **fixed))
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(other[name], value), name


def check_convolutions() -> None:
    """Any packing, counts, states and taps, over several pieces."""
    import torch
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from intarsia_kernels.delta_rule import short_conv
    from intarsia_models_common.linear_attention.short_conv import short_conv as reference

    short_conv.LENGTH = 16

    @settings(max_examples=25, deadline=None, database=None)
    @given(st.data())
    def random(data: Any) -> None:
        rows, tokens, taps = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 40)), data.draw(st.integers(2, 5))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
        inputs = {
            "x_BSC": torch.randn(rows, tokens, 20, generator=generator, dtype=torch.float64),
            "weight_CK": torch.randn(20, taps, generator=generator, dtype=torch.float64),
        }
        if data.draw(st.booleans()):
            inputs["state_BKC"] = torch.randn(rows, taps - 1, 20, generator=generator, dtype=torch.float64)
        fixed: dict[str, Any] = {"activation": data.draw(st.sampled_from(["silu", "none"]))}
        if data.draw(st.booleans()):
            begins = torch.tensor([[data.draw(st.integers(0, 5)) == 0 for _ in range(tokens)] for _ in range(rows)])
            fixed["documents_BS"] = begins.long().cumsum(1) % 3
        if data.draw(st.booleans()):
            fixed["counts_B"] = torch.tensor([data.draw(st.integers(0, tokens)) for _ in range(rows)])
        exact = results(reference, inputs, torch.float32, torch.float64, **fixed)
        compare(results(short_conv.short_conv, inputs, torch.float32, **fixed), exact, 3e-6, fixed)

    random()


def check_compiled() -> None:
    """For compute capability 9.0 at the width of released models: products of states are warp groups' (their left factors from registers), and as many programs as are launched for a multiprocessor share it."""
    from intarsia_kernels.delta_rule import recurrence, settings

    cuts = settings.NARROW[128]
    for kernel, cut_ in ((recurrence.forward_kernel, cuts.forward), (recurrence.backward_kernel, cuts.backward)):
        compiled = compiled_for_hopper(kernel, cut_, {"BLOCK_V": cut_.block})
        assert "wgmma.mma_async" in compiled.asm["ptx"] and "mma.sync" not in compiled.asm["ptx"].replace("wgmma.mma_async.sync", "")
        assert compiled.metadata.shared <= SHARED // cut_.resident - 1024, compiled.metadata.shared


def check_turned() -> None:
    """No product takes what was turned in registers: Triton from 3.4 to 3.7.0 would hand it to Hopper's tensor cores in registers that are in use again."""
    import re

    from intarsia_kernels.delta_rule import gradients, settings

    cuts = settings.NARROW[128]
    ttgir = compiled_for_hopper(gradients.gradients_kernel, cuts.gradients, {"BLOCK_V": cuts.gradients.block}).asm["ttgir"]
    turned = re.findall(r"(%\S+) = tt\.trans %\S+ .*tensor<\S+, #(?:mma|linear)", ttgir)
    assert "ttng.warp_group_dot" in ttgir and not turned, turned


def check_wide_numbers() -> None:
    """Compiled regions hand over scales, caps and epsilon in float64: nothing is computed in it. Those of attention in blocks as well."""
    from intarsia_kernels.delta_rule import gradients, prepare, settings
    from intarsia_kernels.invariant import blocks

    cuts = settings.NARROW[128]
    attention = {
        "D": 64,
        "DV": 64,
        "BLOCK_D": 64,
        "BLOCK_DV": 64,
        "ROWS": 64,
        "KEYS": blocks.KEYS,
        "GROUPS": 4,
        "PACKED": False,
        "PRECISION": "ieee",
    }
    attention |= {"HAS_SOFTCAP": True, "HAS_WINDOW": True, "HAS_SINKS": True}
    kernels = [(kernel, settings.Cut(64, 4, 2), attention) for kernel in (blocks._forward, blocks._backward_queries, blocks._backward_keys)]
    for kernel, cut_, block in (
        (prepare.prepare_kernel, cuts.prepare, {"BLOCK_K": cuts.prepare.block}),
        (gradients.gradients_kernel, cuts.gradients, {"BLOCK_V": cuts.gradients.block}),
        *kernels,
    ):
        ptx = compiled_for_hopper(kernel, cut_, block).asm["ptx"]
        wide = [line for line in ptx.splitlines() if ".f64" in line and not any(word in line for word in ("cvt.", ".reg", ".param"))]
        assert not wide, wide[:5]


def compiled_for_hopper(kernel: Any, cut_: Any, block: dict[str, int]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    floats = ("factors_pointer", "state_pointer", "final_pointer", "dfinal_pointer", "dstate_pointer", "decay_pointer", "beta_pointer")
    floats += ("ddecay_pointer", "dbeta_pointer", "lse_pointer", "delta_pointer")
    integers = ("borders_pointer", "runs_pointer", "count_pointer", "ordinals_pointer", "table_pointer")
    types = {name: "*bf16" if name.endswith("_pointer") else "i32" for name in kernel.arg_names}
    types |= dict.fromkeys(floats, "*fp32") | dict.fromkeys(integers, "*i32") | {"counts_pointer": "*i64", "documents_pointer": "*i64"}
    types |= {"scale": "fp64", "eps": "fp64", "softcap": "fp64"}
    given = {"K": 128, "V": 128, "C": 64, "STAGES": cut_.stages, "PRECISION": "tf32x3", **block}
    given |= {"DOCUMENTS": True, "COUNTS": False, "STATE": False, "OUTPUT": True, "KEEP": True, "FINAL": False}
    given |= {"NORMALISE": True, "EXACT": False}
    given = {name: value for name, value in given.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in given else types[name] for name in kernel.arg_names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(kernel.arg_names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in given.items()}, aligned)
    options = {"num_warps": cut_.warps, "num_stages": cut_.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
        import triton_interpreter

        triton_interpreter.repair()
    if ":" in sys.argv[1]:
        check_promises(*sys.argv[1].split(":"))
    else:
        globals()[f"check_{sys.argv[1]}"]()
