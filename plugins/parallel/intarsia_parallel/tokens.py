"""How many tokens the pass that runs now has, before tensor parallelism cuts them.

A part of the sequence does not tell how long the whole is, so that whoever gathers needs the number from elsewhere: from the pass's context. The model and each
of its blocks note it when they begin, recomputation in backward included. It is kept for each thread: autograd recomputes on threads of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from intarsia.comm import Communicator
from intarsia.errors import PluginError
from torch import Tensor, nn

from intarsia_parallel.collectives import even_counts

_running = threading.local()


def note(tokens: int) -> None:
    """The pass that runs on this thread has rows of `tokens`. Stability: provisional."""
    _running.tokens = tokens


def tokens() -> int:
    """Tokens of a row of the pass that runs on this thread: this rank's part by context parallelism, not cut by tensor parallelism. Stability: provisional."""
    found: int | None = getattr(_running, "tokens", None)
    if found is None:
        raise PluginError("No pass has begun on this thread: a part of a cut model was called outside of the model's forward.")
    return found


def counts(comm: Communicator) -> list[int]:
    """Each rank's part of a row's tokens along the tensor-parallel group `comm`. Stability: provisional."""
    return even_counts(tokens(), comm.size)


def checked_counts(x: Tensor, dim: int, comm: Communicator, name: str) -> list[int]:
    """`counts`, compared with what `x` has. Raises PluginError where `x` is not this rank's part."""
    found = counts(comm)
    if x.shape[dim] != found[comm.rank]:
        raise PluginError(
            f"{name}: a tensor of shape {tuple(x.shape)} came in, but this rank's part of {sum(found)} tokens is {found[comm.rank]} in dimension {dim}. Modules "
            "between regions work on the part; check the roles of what comes before it in the sharding table."
        )
    return found


def notes(module: nn.Module) -> None:
    """Let `module` note the tokens whenever its forward runs with a context among its arguments."""
    module.forward = functools.partial(_noting, module.forward)  # type: ignore[method-assign]


def _noting(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _note_from(args, kwargs)
    return forward(*args, **kwargs)


@torch.compiler.disable
def _note_from(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        positions = getattr(value, "positions_BS", None)
        if positions is not None:
            note(positions.shape[1])
            return
