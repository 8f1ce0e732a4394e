"""Finding the first module whose numbers are not finite."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def as_written() -> contextlib.AbstractContextManager[Any]:
    """Compiled regions run as written: hooks inside them are not called otherwise. Where nothing was compiled, dynamo stays unimported."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


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
