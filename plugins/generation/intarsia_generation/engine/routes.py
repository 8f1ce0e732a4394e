"""Which experts the routers of a model chose, kept beside its caches.

Shape suffixes: N new tokens in a line, L layers of experts, K experts of a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from intarsia_rl.contracts import Routes
from torch import Tensor, nn


def has_routers(model: nn.Module) -> bool:
    """Whether layers of the model choose experts and say so (`intarsia_models_common.moe.replay`)."""
    return any(getattr(module, "route_number", None) is not None for module in model.modules())


class RouteCache:
    """Choices for every token whose caches are kept, by slot, so that a prefix that others computed has them too. Memory is taken in the first call of the model."""

    def __init__(self, model: nn.Module, slots: int) -> None:
        self.serves = has_routers(model)
        self._slots = slots
        self._kept: Tensor | None = None

    @contextlib.contextmanager
    def recording(self, slots_N: Tensor, whole: Callable[[Tensor], Tensor] | None = None) -> Iterator[None]:
        """Keep what routers choose in a call of the model for tokens in these slots. `whole` makes [N, L, K] of all tokens from those that this rank's routers saw."""
        if not self.serves:
            yield
            return
        from intarsia_models_common.moe.replay import recorded_routes

        with recorded_routes() as routes:
            yield
        choices_NLK = routes.stacked() if whole is None else whole(routes.stacked())
        if self._kept is None:
            self._kept = choices_NLK.new_zeros((self._slots, *choices_NLK.shape[1:]))
        self._kept.index_copy_(0, slots_N, choices_NLK)

    def read(self, slots: Sequence[int]) -> Tensor:
        """The choices at these slots, [tokens, L, K] int16 on the CPU."""
        assert self._kept is not None, "nothing was computed yet"
        return self._kept.index_select(0, torch.tensor(slots, dtype=torch.int64).to(self._kept.device)).cpu()


def routes_of(parts: Sequence[Tensor]) -> Routes:
    """What is reported of a request, of its tokens in order."""
    choices_NLK = torch.cat(list(parts))
    tokens, layers, k = choices_NLK.shape
    return Routes(choices_NLK.numpy().astype("<i2").tobytes(), (tokens, layers, k))
