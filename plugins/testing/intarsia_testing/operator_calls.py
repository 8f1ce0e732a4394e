"""Which operators a piece of code calls: the record that tests of models and of kernels look at."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from intarsia import ops


@dataclasses.dataclass(frozen=True)
class Call:
    """One recorded call: shapes and dtypes of its tensors by argument name or position. Stability: provisional."""

    op: str
    kernel: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]


@contextlib.contextmanager
def record() -> Iterator[list[Call]]:
    """Collect every call of an operator made outside compiled regions within a `with` block, in order. Stability: provisional.

    A call that a kernel could not take is recorded with kernel `reference`.
    """
    calls: list[Call] = []
    before = {op: op._run for op in ops.operators().values()}
    for op, run in before.items():
        op._run = _recorded(op, run, calls)
    try:
        yield calls
    finally:
        for op, run in before.items():
            op._run = run


def _recorded(op: ops.Operator, run: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    kernel, supports = op.choice.kernel, getattr(op.choice.function, "supports", None)

    def recorded(*arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            tensors = {str(k): v for k, v in (*enumerate(arguments), *named.items()) if isinstance(v, torch.Tensor)}
            dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
            taken = supports is None or supports(*arguments, **named) is None
            calls.append(Call(op.name, kernel if taken else "reference", {name: tuple(t.shape) for name, t in tensors.items()}, dtypes))
        return run(*arguments, **named)

    return recorded
