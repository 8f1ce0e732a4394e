"""Conformance of kernels. Subclass, name your entry, run pytest; a failure says which promise is broken, in words.

    class TestMine(KernelConformance):
        op, entry = "rms_norm", "my-distribution:mine"

The reference is the judge: in float64 for errors, in the kernel's dtype for bits. A bound in `KernelEntry.bounds` is the largest difference over the largest element of
what the reference gives in float64, by `output`, by a gradient's argument name, or `*` for all; `NAME@DTYPE` holds for one dtype only.
The same checks run without pytest as `intarsia kernels check NAME`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from intarsia import ops
from intarsia.contracts import KernelEntry
from intarsia.device import capabilities
from intarsia.errors import IntarsiaError
from intarsia.plugins import current
from torch import Tensor

from intarsia_testing.base import Conformance
from intarsia_testing.kernel_cases import Case, cases
from intarsia_testing.promise import broken, keep

DTYPES = ("float32", "bfloat16", "float16", "float64")


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New, unwritten memory holds NaN: what a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def run(function: Any, arguments: dict[str, Any], op: str) -> dict[str, Tensor]:
    """Outputs and gradients by name, for cotangents that are fixed functions of the outputs' shapes: `output`, of further outputs `output_1` and so on. Where `counts_B` says how many of each
    row's tokens are real, the first output is 0 behind them."""
    prepare = getattr(function, "prepare", None)
    if prepare is not None and arguments.get("packing") is not None:
        prepare(arguments["packing"], windows=(arguments.get("window"),), documents_BS=arguments["documents_k_BT"])
    found = function(**arguments)
    outputs = list(found) if isinstance(found, tuple) else [found]
    if arguments.get("counts_B") is not None:
        behind_BS = torch.arange(outputs[0].shape[1], device=outputs[0].device) >= arguments["counts_B"][:, None]
        outputs[0] = outputs[0].masked_fill(behind_BS.view(*behind_BS.shape, *(1,) * (outputs[0].ndim - 2)), 0.0)
    # Whole numbers, and what is declared to be without gradient, have none.
    led = [y for y in outputs if y.requires_grad]
    waves = [torch.cos(torch.arange(y.numel(), dtype=torch.float64) * 0.7).reshape(y.shape).to(y.device, y.dtype) for y in led]
    leaves = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.requires_grad}
    gradients = torch.autograd.grad(led, list(leaves.values()), waves, allow_unused=True) if led and leaves else [None] * len(leaves)
    named = {"output" if n == 0 else f"output_{n}": y.detach() for n, y in enumerate(outputs)}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        named[name] = torch.zeros_like(leaf) if gradient is None else gradient.detach()
    return named


class KernelConformance(Conformance):
    """Every promise of a kernel, one test each.

    Set `op` and `entry`. `device` is where it runs: by default the GPU where the kernel needs one.
    """

    kind: ClassVar[str] = "kernel"
    op: ClassVar[str] = ""
    device: ClassVar[str] = ""
    present: ClassVar[tuple[str, ...]] = ()
    """Capabilities to take for granted (an interpreter that stands in for a GPU)."""

    # ------------------------------------------------------------ help

    def found_entry(self) -> KernelEntry:
        """The entry under test."""
        keep("named", self.entry and self.op, "set the class attributes `op` and `entry`.")
        try:
            found = current().registry("kernel").find(self.entry, op=self.op)
        except IntarsiaError as error:
            broken("offered", str(error))
        assert isinstance(found, KernelEntry)
        return found

    def _function(self) -> Any:
        entry = self.found_entry()
        lacking = [need for need in entry.needs if need not in capabilities() and need not in self.present]
        if lacking:
            pytest.skip(f"{entry.full_name} needs {', '.join(lacking)}, which this machine lacks: run its checks where it has that")
        return current().target(entry)

    def _device(self) -> str:
        return self.device or ("cuda" if "cuda" in self.found_entry().needs else "cpu")

    def _dtypes(self) -> list[str]:
        dtypes = [name for name in DTYPES if name in self.found_entry().dtypes] or list(DTYPES[:2])
        # TRITON_INTERPRET multiplies bfloat16 wrongly, and that is the interpreter's fault.
        return [name for name in dtypes if name != "bfloat16" or "TRITON_INTERPRET" not in os.environ]

    def _cases(self, dtype: str) -> list[Case]:
        """The cases that the kernel supports."""
        function = self._function()
        known = cases(self.op)
        keep("operator", known, f"the kit knows no calls of operator {self.op!r}. Known: {', '.join(ops.operators())}.")
        supports = getattr(function, "supports", lambda **_: None)
        taken = []
        for case in known:
            reason = supports(**case.arguments(getattr(torch, dtype), self._device()))
            keep(
                "supports",
                reason is None or (isinstance(reason, str) and reason),
                f"`supports` gave {reason!r} for {case.label}; it gives None, or why not.",
            )
            if reason is None:
                taken.append(case)
        keep("supports", taken, f"the kernel refuses every one of {len(known)} calls of {self.op} in {dtype}.")
        return taken

    def _run(self, case: Case, dtype: str, function: Any = None) -> dict[str, Tensor]:
        return run(function or self._function(), case.arguments(getattr(torch, dtype), self._device()), self.op)

    def _bound(self, name: str, dtype: str) -> float:
        bounds = self.found_entry().bounds
        for key in (f"{name}@{dtype}", f"*@{dtype}", name, "*"):
            if key in bounds:
                return bounds[key]
        return broken(
            "bounds", f"numerics is `tolerance` and `bounds` has nothing for {name} in {dtype}: give `{name}`, `*`, or `*@{dtype}`."
        )

    # ------------------------------------------------------------ promises

    def test_signature_is_the_references(self) -> None:
        """The kernel takes the reference's arguments by the same names, with the same defaults."""
        reference = inspect.signature(ops.operators()[self.op].reference).parameters
        own = inspect.signature(self._function()).parameters
        keep("signature", list(own) == list(reference), f"its parameters are {', '.join(own)}; the reference's are {', '.join(reference)}.")
        other = [name for name in own if own[name].default != reference[name].default]
        keep("signature", not other, f"{', '.join(other)} have another default than the reference's.")

    def test_output_and_gradients_are_within_bounds(self) -> None:
        """Against the reference: the same bits, or within the declared bounds of float64."""
        reference, entry = ops.operators()[self.op].reference, self.found_entry()
        for dtype in self._dtypes():
            for case in self._cases(dtype):
                found = self._run(case, dtype)
                bitwise = entry.numerics == "bitwise"
                wide = getattr(torch, dtype) if bitwise else torch.float64
                exact = run(reference, case.arguments(wide, self._device(), getattr(torch, dtype)), self.op)
                for name, value in exact.items():
                    keep(
                        "shape",
                        found[name].shape == value.shape,
                        f"{case.label}, {dtype}: {name} is {tuple(found[name].shape)}, not {tuple(value.shape)}.",
                    )
                    if not value.numel():
                        continue
                    if bitwise:
                        keep(
                            "bitwise", torch.equal(found[name], value), f"{case.label}, {dtype}: {name} is not bit for bit the reference's."
                        )
                        continue
                    keep("finite", found[name].isfinite().all(), f"{case.label}, {dtype}: {name} is not finite everywhere.")
                    largest = float(value.abs().max())
                    error = float((found[name].double() - value.double()).abs().max()) / (largest or 1.0)
                    if entry.numerics == "tolerance":
                        bound = self._bound(name, dtype)
                        keep(
                            "bounds",
                            error <= bound,
                            f"{case.label}, {dtype}: {name} is off by {error:.2e} relative to float64; {bound:.0e} is declared.",
                        )

    def test_writes_every_element(self) -> None:
        """With unwritten memory full of NaN it gives the same, and finite, numbers."""
        dtype = self._dtypes()[0]
        for case in self._cases(dtype):
            with poisoned():
                found = self._run(case, dtype)
            for name, value in found.items():
                keep("poisoned outputs", not value.isnan().any(), f"{case.label}: {name} holds NaN where memory was never written.")

    def test_leaves_its_inputs_unchanged(self) -> None:
        """Neither forward nor backward writes into an argument."""
        dtype = self._dtypes()[0]
        for case in self._cases(dtype):
            arguments = case.arguments(getattr(torch, dtype), self._device())
            before = {name: value.detach().clone() for name, value in arguments.items() if isinstance(value, Tensor)}
            run(self._function(), arguments, self.op)
            changed = [name for name, value in before.items() if not torch.equal(value, arguments[name].detach())]
            keep("unchanged inputs", not changed, f"{case.label}: it writes into {', '.join(changed)}.")

    def test_is_reproducible_where_declared(self) -> None:
        """The same call twice gives the same bits."""
        if self.found_entry().numerics == "tolerance":
            return
        dtype = self._dtypes()[0]
        for case in self._cases(dtype):
            one, again = self._run(case, dtype), self._run(case, dtype)
            other = [name for name in one if not torch.equal(one[name], again[name])]
            keep("reproducible", not other, f"{case.label}: two equal calls gave other bits in {', '.join(other)}.")

    def test_is_invariant_where_declared(self) -> None:
        """A row's output does not depend on the batch around it, bit for bit."""
        if not self.found_entry().invariant:
            return
        for dtype in self._dtypes():
            for case in self._cases(dtype):
                together = self._run(case, dtype)["output"]
                for b in range(together.shape[0] if case.batched or case.rows else 0):
                    alone = case.row(b)
                    if alone is not None:
                        same = torch.equal(self._run(alone, dtype)["output"][0], together[b])
                        keep("invariant", same, f"{case.label}, {dtype}: row {b} alone gives other bits than in the batch.")

    def test_packed_documents_are_as_separate_ones(self) -> None:
        """Attention: a packed document gives what it gives alone."""
        if self.op != "attention":
            return
        dtype = self._dtypes()[0]
        for case in (case for case in self._cases(dtype) if "packing" in case.fixed):
            function, arguments = self._function(), case.arguments(getattr(torch, dtype), self._device())
            arguments = {name: value.detach() if isinstance(value, Tensor) else value for name, value in arguments.items()}
            packed = self._run(case, dtype)["output"]
            named = {name: arguments[name] for name in ("scale", "window", "softcap", "sinks_H") if name in arguments}
            for b, row in enumerate(case.fixed["packing"]):
                start = 0
                for length in row:
                    stop = start + length
                    alone = function(*(arguments[name][b : b + 1, start:stop] for name in ("q_BSHD", "k_BTKD", "v_BTKD")), **named)[0]
                    error = float((packed[b, start:stop] - alone).abs().max()) / float(packed.abs().max())
                    bound = self._bound("output", dtype)
                    keep(
                        "packing",
                        error <= bound,
                        f"{case.label}: document of {length} tokens at {start} in row {b} is off by {error:.1e} from the same alone.",
                    )
                    start = stop

    def test_may_sit_in_a_compiled_region_where_declared(self) -> None:
        """torch.compile traces it without a break."""
        if not self.found_entry().in_compile or "TRITON_INTERPRET" in os.environ:
            return
        function, dtype = self._function(), self._dtypes()[0]
        for case in self._cases(dtype)[:6]:
            torch.compiler.reset()
            try:
                found = self._run(case, dtype, torch.compile(function, fullgraph=True, backend="aot_eager"))
            except Exception as error:
                broken("in_compile", f"{case.label}: torch.compile(fullgraph=True) refuses it: {str(error).splitlines()[:1]}")
            plain = self._run(case, dtype)
            for name, value in plain.items():
                if self.found_entry().numerics == "bitwise" or not value.is_floating_point():
                    keep("in_compile", torch.equal(found[name], value), f"{case.label}: compiled, {name} has other bits.")
                elif value.numel():
                    off = float((found[name] - value).abs().max()) / float(value.abs().max().clamp_min(1e-30))
                    keep(
                        "in_compile",
                        off <= 10 * self._bound(name, dtype),
                        f"{case.label}: compiled, {name} is off by {off:.1e} from itself.",
                    )


def check(op: str, entry: str, present: tuple[str, ...] = (), device: str = "") -> Iterator[tuple[str, str, str]]:
    """Run every check without pytest: (check, `kept`, `broken` or `skipped`, sentence), one by one."""
    kind = type("Check", (KernelConformance,), {"op": op, "entry": entry, "present": present, "device": device})
    for name in [name for base in (Conformance, KernelConformance) for name in vars(base) if name.startswith("test_")]:
        doc = (getattr(kind, name).__doc__ or "").strip()
        try:
            getattr(kind(), name)()
            yield name.removeprefix("test_"), "kept", doc
        except pytest.skip.Exception as error:
            yield name.removeprefix("test_"), "skipped", str(error)
        except pytest.fail.Exception as error:
            yield name.removeprefix("test_"), "broken", str(error)
