"""Finding where a number stopped being finite, once a step has shown that one did."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.contracts import Batch, ShardedModel
from torch import Tensor, nn

Find = Callable[[Batch, float], Mapping[str, Any] | None]

# The compiler's stance is the process's: one entry for each thread that runs compiled regions as written, all of them the first one's.
_STANCES: list[Any] = []
_LOCK = threading.Lock()


def explain_not_finite(find: Find, batches: Sequence[Batch], scale: float, sharded: ShardedModel, world: Communicator) -> str:
    """What an engine's `explain_not_finite` says (see `intarsia.contracts.Engine`). A collective. Stability: provisional.

    `find(batch, scale)` runs a micro-batch again, on all ranks alike, and says what is not finite first on this rank: its `module`, `where` in it, and the
    names of those of its own `parameters` that are not finite; None where everything is. The first offence of the first micro-batch on the
    lowest rank is named. Where nothing recurs (a parameter's own gradient, randomness), parameters' gradients are.
    """
    gradients = _bad_gradient(sharded, world.rank)
    found: list[dict[str, Any]] = []
    for number, batch in enumerate(batches):
        sharded.zero_gradients()
        sharded.set_last_micro_batch(False)
        offence = find(batch, scale)
        local = {"rank": world.rank, "micro_batch": number, "samples": list(batch.samples), **offence} if offence else None
        found = [each for each in world.gather_json(local, what="non-finite modules") if each]
        if found:
            break
    if not found:
        found = [each for each in world.gather_json(gradients, what="non-finite gradients") if each]
    return _sentence(found[0] if found else None, world.size)


def _sentence(first: dict[str, Any] | None, ranks: int) -> str:
    if first is None:
        return f"Running its micro-batches again gave finite numbers on all {ranks} ranks: the fault does not repeat."
    text = f"First offending module: {first['module']}, gradient of its parameter {first.get('parameter')!r}, on rank {first['rank']}."
    if "micro_batch" in first:
        text = (
            f"First offending module: {first['module']}, {first['where']}, on rank {first['rank']}, in micro-batch {first['micro_batch']} "
            f"(samples {', '.join(map(str, first['samples'][:8]))}{', ...' * (len(first['samples']) > 8)})."
        )
    return f"{text} Its own parameters are not finite: {', '.join(first['parameters'])}." if first.get("parameters") else text


def _bad_gradient(sharded: ShardedModel, rank: int) -> dict[str, Any] | None:
    """The parameter whose non-finite gradient came first: backward runs against the order of parameters."""
    for name, parameter in reversed(list(sharded.parameters().items())):
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            return {"rank": rank, "module": name.rpartition(".")[0] or "the model", "parameter": name}
    return None


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Compiled regions run as written: hooks inside them are not called otherwise. Where nothing was compiled, dynamo stays unimported.

    Threads may be within at once, and leave in any order: the last one out restores what the first one found.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _LOCK:
        # Made, it is in force.
        _STANCES.append(_STANCES[0] if _STANCES else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _LOCK:
            stance = _STANCES.pop()
            if not _STANCES:
                stance.__exit__(None, None, None)


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


@contextlib.contextmanager
def checked(model: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """While active, the list gets an entry for each module whose output, or its gradient, is not finite, in the order in which they happen."""
    offences: list[dict[str, Any]] = []

    def report(name: str, module: nn.Module, where: str) -> None:
        own = [f"{name}.{key}" for key, value in module.named_parameters(recurse=False) if not _finite(value.detach())]
        offences.append({"module": f"{name or 'the model'} ({type(module).__name__})", "where": where, "parameters": own})

    def hook(name: str) -> Any:
        def check(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in (output,) if isinstance(output, Tensor) else output if isinstance(output, tuple | list) else ():
                if not isinstance(tensor, Tensor):
                    continue
                if not _finite(tensor.detach()):
                    report(name, module, "output of forward")
                if tensor.requires_grad and tensor.is_floating_point():
                    tensor.register_hook(lambda grad: None if _finite(grad) else report(name, module, "gradient of its output in backward"))

        return check

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield offences
    finally:
        for handle in handles:
            handle.remove()
