"""The experts that routers chose: reported by who generates, and chosen again by who trains. N tokens, B rows, S tokens of a row, L layers, K experts of a token.

    with recorded_routes() as routes:          # generating
        model(tokens_BS, context)
    routes.stacked()                           # int16 [N, L, K], N = B S in the order of the call's tokens

    context.routes_BSLK = routes_BSLK          # training: an attribute of the context, int16, -1 where a token's experts are the router's own choice

Layers are numbered from the first that chooses, along the model's `layers` (`number_layers`); what predicts further ahead than the next token chooses for itself. Weights
are the trainer's: those of the experts that were chosen, with a gradient to the router.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from intarsia.errors import UsageError
from torch import Tensor, nn

ROUTES = "routes_BSLK"
"""The name of a batch's tensor of routes, and of the attribute of contexts that have it."""


class RecordedRoutes:
    """What layers chose, in the order of their calls. Stability: provisional."""

    def __init__(self) -> None:
        self.layers: dict[int, list[Tensor]] = {}

    def stacked(self) -> Tensor:
        """int16 [N, L, K] of all calls since the beginning, on the device. UsageError where nothing chose, or not every layer did."""
        if not self.layers:
            raise UsageError("No layer chose experts: routes were asked for of a model that has no routers, or that was not called.")
        numbers = sorted(self.layers)
        if numbers != list(range(len(numbers))):
            raise UsageError(f"Layers {numbers} of those that choose experts were called; routes are of all from the first on.")
        layers = [torch.cat(self.layers[number]) for number in numbers]
        if len({layer.shape for layer in layers}) > 1:
            raise UsageError(
                f"Layers chose experts [tokens, experts of a token] of shapes {[tuple(layer.shape) for layer in layers]}; routes are of layers alike."
            )
        return torch.stack(layers, 1)


class _Recorder(threading.local):
    routes: RecordedRoutes | None = None


_recorder = _Recorder()


@contextlib.contextmanager
def recorded_routes() -> Iterator[RecordedRoutes]:
    """Report what layers choose in the forward passes of this thread. Stability: provisional."""
    before, routes = _recorder.routes, RecordedRoutes()
    _recorder.routes = routes
    try:
        yield routes
    finally:
        _recorder.routes = before


def number_layers(layers: nn.Module) -> None:
    """Number the modules that choose experts (they have an attribute `route_number`), in their order. Stability: provisional."""
    for number, layer in enumerate(module for module in layers.modules() if hasattr(module, "route_number")):
        layer.route_number = number  # type: ignore[assignment]


def record(number: int | None, experts_NK: Tensor) -> None:
    """Note a layer's choice where somebody asked for it; `number` None is a layer that nobody replays."""
    if number is not None and _recorder.routes is not None:
        _outside()(_recorder.routes, number, experts_NK)


def _note(routes: RecordedRoutes, number: int, experts_NK: Tensor) -> None:
    # Within a backward pass the layer runs for the second time.
    if torch._C._current_graph_task_id() == -1:
        routes.layers.setdefault(number, []).append(experts_NK.detach().to(torch.int16))


def _outside() -> Callable[[RecordedRoutes, int, Tensor], None]:
    """`_note`, kept out of compiled regions by a decorator that imports the compiler: not for those who only load a model."""
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_note)
    return _note


def forced_experts(context: Any, number: int | None) -> Tensor | None:
    """int16 [B, S, K] that a layer is to choose, as the context has them; None where it has none. UsageError where it has too few layers."""
    routes_BSLK: Tensor | None = getattr(context, ROUTES, None)
    if routes_BSLK is None or number is None:
        return None
    if number >= routes_BSLK.shape[2]:
        raise UsageError(
            f"The batch has routes of {routes_BSLK.shape[2]} layers, and the model has more that choose experts. Generator and trainer must run one model."
        )
    return routes_BSLK[:, :, number]
