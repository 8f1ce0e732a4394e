"""`intarsia kernels list|check|bench`. Torch is imported when a subcommand runs."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from intarsia.contracts import KernelEntry
from intarsia.errors import PluginError, UsageError, did_you_mean
from intarsia.plugins import current


class Kernels:
    """The command."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """list, check, bench."""
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        listing = actions.add_parser("list", help="Operators and their kernels, and what this machine lacks for each.")
        listing.add_argument("--json", action="store_true", help="Print JSON.")
        check = actions.add_parser("check", help="Run the conformance kit on a kernel: errors, gradients, poisoned memory, promises.")
        check.add_argument("name", help="The kernel's name, or owner:name.")
        check.add_argument("--op", help="Its operator, where several kernels have that name.")
        check.add_argument("--json", action="store_true", help="Print JSON.")
        bench = actions.add_parser("bench", help="Time kernels against the reference on this machine.")
        bench.add_argument("op", nargs="?", help="Only this operator.")
        bench.add_argument("--dtype", default="", help="float32, bfloat16 or float16; default: bfloat16 on a GPU, else float32.")
        bench.add_argument("--compiled", action="store_true", help="Time them inside torch.compile, as a compiled region runs them.")
        bench.add_argument("--repeat", type=int, default=10, help="Timed calls; the median counts.")
        bench.add_argument(
            "--save", type=Path, help="Write the ratios of a --compiled run where INTARSIA_KERNEL_MEASUREMENTS can point to."
        )
        bench.add_argument("--json", action="store_true", help="Print JSON.")

    def run(self, arguments: argparse.Namespace) -> int:
        """0, or 3 where a check fails."""
        if arguments.action == "list":
            return _list(arguments.json)
        if arguments.action == "check":
            return _check(arguments.name, arguments.op, arguments.json)
        return _bench(arguments)


def _entries() -> list[KernelEntry]:
    return [entry for entry in current().registry("kernel").entries() if isinstance(entry, KernelEntry)]


def _list(as_json: bool) -> int:
    from intarsia.device import capabilities
    from intarsia.ops import operators

    here = capabilities()
    rows: list[dict[str, Any]] = []
    for op in operators():
        for entry in sorted((e for e in _entries() if e.op == op), key=lambda e: -e.priority):
            lacking = [need for need in entry.needs if need not in here]
            rows.append(
                {
                    "op": op,
                    "kernel": entry.full_name,
                    "priority": entry.priority,
                    "lacking": lacking,
                    "numerics": entry.numerics,
                    "doc": entry.doc,
                }
            )
        rows.append({"op": op, "kernel": "reference", "priority": 0, "lacking": [], "numerics": "bitwise", "doc": "The definition."})
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        state = f"lacks {', '.join(row['lacking'])}" if row["lacking"] else "usable here"
        print(f"{row['op']:22} {row['kernel']:36} {state:28} {row['doc']}")
    return 0


def _find(name: str, op: str | None) -> KernelEntry:
    _check_operator(op)
    found = current().registry("kernel").find(name, **({"op": op} if op else {}))
    if not isinstance(found, KernelEntry):
        raise PluginError(f"kernel {found.full_name!r} is no KernelEntry.")
    return found


def _check_operator(op: str | None) -> None:
    from intarsia.ops import operators

    if op and op not in operators():
        raise UsageError(f"There is no operator {op!r}. {did_you_mean(op, operators())}")


def _check(name: str, op: str | None, as_json: bool) -> int:
    from intarsia_testing.kernel import check

    entry = _find(name, op)
    results = []
    for test, outcome, sentence in check(entry.op, entry.full_name):
        results.append({"check": test, "outcome": outcome, "message": sentence})
        if not as_json:
            print(f"{outcome:8} {test}: {sentence}", flush=True)
    if as_json:
        print(json.dumps({"kernel": entry.full_name, "op": entry.op, "checks": results}, indent=2))
    return PluginError.exit_code if any(result["outcome"] == "broken" for result in results) else 0


def _bench(arguments: argparse.Namespace) -> int:
    import torch
    from intarsia.device import capabilities
    from intarsia.ops import operators

    _check_operator(arguments.op)
    if arguments.save and not arguments.compiled:
        raise UsageError("--save writes what a compiled region measured; add --compiled.")
    device = "cuda" if "cuda" in capabilities() else "cpu"
    dtype = arguments.dtype or ("bfloat16" if device == "cuda" else "float32")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"--dtype is {dtype!r}. {did_you_mean(dtype, ('float32', 'bfloat16', 'float16'))}")
    rows = []
    for op in [arguments.op] if arguments.op else list(operators()):
        usable = [e for e in _entries() if e.op == op and set(e.needs) <= capabilities() and (not e.dtypes or dtype in e.dtypes)]
        for row in _time_operator(op, usable, getattr(torch, dtype), device, arguments):
            rows.append(row)
            if not arguments.json:
                line = f"{row['op']:22} {row['kernel']:36} forward {row['forward_ms']:9.3f} ms   with backward {row['total_ms']:9.3f} ms"
                print(f"{line}   {row['speed']:5.2f} x the reference   ({row['case']})", flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=2))
    if arguments.save:
        ratios = {row["kernel"]: row["speed"] for row in rows if row["kernel"] != "reference"}
        arguments.save.write_text(json.dumps(ratios, indent=2) + "\n")
    return 0


def _time_operator(op: str, entries: list[KernelEntry], dtype: Any, device: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import torch
    from intarsia.ops import operators

    from intarsia_testing.kernel_cases import bench_case

    case = bench_case(op, small=device == "cpu")
    base = None
    for kernel, function in [("reference", operators()[op].reference), *((e.full_name, current().target(e)) for e in entries)]:
        named = case.arguments(dtype, device)
        supports = getattr(function, "supports", None)
        prepare = getattr(function, "prepare", None)
        if prepare is not None and named.get("packing") is not None:
            prepare(named["packing"], windows=(None,), documents_BS=named["documents_k_BT"])
        if supports is not None and supports(**named) is not None:
            continue
        run = torch.compile(function, fullgraph=True) if arguments.compiled else function
        forward = _median(functools.partial(run, **named), device, arguments.repeat)
        leaves = [value for value in named.values() if isinstance(value, torch.Tensor) and value.requires_grad]

        def both(run: Callable[..., Any] = run, named: dict[str, Any] = named, leaves: list[Any] = leaves) -> None:
            output = run(**named)
            torch.autograd.grad(output, leaves, torch.ones_like(output))

        total = _median(both, device, arguments.repeat)
        base = base or total
        yield {"op": op, "kernel": kernel, "case": case.label, "forward_ms": forward * 1e3, "total_ms": total * 1e3, "speed": base / total}


def _median(call: Callable[[], Any], device: str, repeat: int) -> float:
    """Seconds of one call: the median after three to warm up, each waited for."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for i in range(repeat + 3):
        wait()
        start = time.perf_counter()
        call()
        wait()
        if i >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times)
