"""Finding where a number stopped being finite, once a step has shown that one did."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from intarsia.contracts import Batch
from intarsia.errors import CheckpointError, NumericsError
from intarsia.train.built import Built


def explain_not_finite(built: Built, batches: Sequence[Batch], scale: float, loss: float, norm: float) -> NumericsError:
    """The error that ends the run, the same on every rank. A collective.

    The step's micro-batches are run again, uncompiled, with every module's output and that output's gradient checked; the first offence of the first
    micro-batch on the lowest rank is named. Where nothing recurs (a parameter's own gradient, randomness), parameters' gradients are named.
    """
    gradients = _bad_gradient(built)
    local: dict[str, Any] | None = None
    found: list[dict[str, Any]] = []
    for number, batch in enumerate(batches):
        built.sharded.zero_gradients()
        built.sharded.set_last_micro_batch(False)
        # Compiled regions run as written: hooks inside them are not called otherwise. Where nothing was compiled, dynamo stays unimported.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
        with eager, _checked(built.model) as offences:
            result = built.engine.micro_batch(built.on_device(batch), scale)
        if not offences and not bool(torch.isfinite(result.total)):
            offences.append({"module": "the loss", "where": "forward"})
        local = {"rank": built.world.rank, "micro_batch": number, "samples": list(batch.samples), **offences[0]} if offences else None
        found = [each for each in built.world.gather_json(local, what="non-finite modules") if each]
        if found:
            break
    if not found:
        found = [each for each in built.world.gather_json(gradients, what="non-finite gradients") if each]
    return NumericsError(_message(built, found[0] if found else None, loss, norm))


def _message(built: Built, first: dict[str, Any] | None, loss: float, norm: float) -> str:
    step = built.run.step
    parts = [f"Step {step} is not finite: loss {loss:g}, gradient norm {norm:g}."]
    if first is None:
        parts.append(f"Running its micro-batches again gave finite numbers on all {built.world.size} ranks: the fault does not repeat.")
    elif "micro_batch" in first:
        parts.append(
            f"First offending module: {first['module']}, {first['where']}, on rank {first['rank']}, in micro-batch {first['micro_batch']} "
            f"(samples {', '.join(map(str, first['samples'][:8]))}{', ...' * (len(first['samples']) > 8)})."
        )
    else:
        parts.append(
            f"First offending module: {first['module']}, gradient of its parameter {first['parameter']!r}, on rank {first['rank']}."
        )
    if first is not None and first.get("parameters"):
        parts.append(f"Its own parameters are not finite: {', '.join(first['parameters'])}.")
    with contextlib.suppress(CheckpointError):  # A save that failed as well is told at the end of the run.
        built.manager.wait()
    latest = built.manager.latest(verify=False)
    kept = f"the last good checkpoint is {latest.location}" if latest else "there is no checkpoint yet"
    parts.append(f"The step was not applied; {kept}. Lower the learning rate, lengthen warm-up, or look at the samples named.")
    return " ".join(parts)


def _bad_gradient(built: Built) -> dict[str, Any] | None:
    """The parameter whose non-finite gradient came first: backward runs against the order of parameters."""
    for name, parameter in reversed(list(built.sharded.parameters().items())):
        if parameter.grad is not None and not _finite(parameter.grad):
            return {"rank": built.world.rank, "module": name.rpartition(".")[0] or "the model", "parameter": name}
    return None


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


@contextlib.contextmanager
def _checked(model: nn.Module) -> Iterator[list[dict[str, Any]]]:
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
