"""The model, its caches, and what is computed with them in a step: the same on every rank of a generator.

Shape suffixes: N tokens or rows in a line, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from intarsia_generation.engine.context import PagedContext, Piece, specs_of, state_bytes
from intarsia_generation.engine.routes import RouteCache
from intarsia_generation.engine.sizes import Sizes
from intarsia_generation.engine.static import Graphs, StaticSteps

if TYPE_CHECKING:
    from intarsia_generation.engine.tensor import Parts


class Runner:
    """A model on one device, whole or this rank's part of it (`parts`), with its caches. Stability: provisional.

    `invariant` keeps every cache's entries where their positions are. `graphs`: see `StaticSteps`. `has_states`: some of what is kept is a state, and no block that another request could read.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        sizes: Sizes,
        *,
        invariant: bool = False,
        parts: Parts | None = None,
        graphs: Graphs = "off",
    ) -> None:
        self.model: Any = model
        self.device, self.parts = device, parts
        specs = specs_of(model)
        self.has_states = state_bytes(specs) > 0
        self.context = PagedContext(
            specs,
            device,
            count=sizes.blocks,
            size=sizes.block,
            sequences=sizes.max_sequences,
            longest=sizes.max_tokens,
            narrow=not invariant,
            # Ranks share out the tokens of a row, so that rows of one token would all be the first rank's. Latents are attended to in rows: in a line they are expanded first.
            line=parts is not None and all(spec.kind != "latent" for spec in specs.values()),
        )
        self.routes = RouteCache(model, (self.context.scratch + 1) * sizes.block)
        self.static = StaticSteps(model, specs, self.context, self.routes, graphs, 1 if parts is None else parts.world.size)

    def hidden(self, pieces: Sequence[Piece], extra: Mapping[str, Any] | None = None) -> Tensor:
        """Run the model on pieces of which all are `decode` or none is; hidden states [N, D] of their tokens, one piece behind the other. `extra`: see the context's `begin`. Where all are `decode` they may lie in
        memory that the next such call overwrites."""
        if pieces[0].decode and (hidden_ND := self.static.hidden(pieces, extra)) is not None:
            return hidden_ND
        tokens_BS = self.context.begin(pieces, extra)
        rows, length = tokens_BS.shape
        whole: Callable[[Tensor], Tensor] | None = None
        if self.parts is not None:
            parts = self.parts

            def whole(choices_NLK: Tensor) -> Tensor:
                return parts.routes(choices_NLK, rows, length)

        with self.routes.recording(self.context.slots_N, whole):
            hidden_BSD: Tensor = self.model(tokens_BS, self.context)
        if self.parts is not None:
            hidden_BSD = self.parts.whole(hidden_BSD, length)
        return hidden_BSD.flatten(0, 1)

    def chosen(self, hidden_ND: Tensor, places: Sequence[int]) -> Tensor:
        """The hidden states at these places of the line."""
        if len(places) == hidden_ND.shape[0]:
            return hidden_ND
        return hidden_ND[torch.tensor(places, dtype=torch.int64).to(self.device)]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V]."""
        if self.parts is not None:
            return self.parts.logits(self.model, hidden_ND)
        logits_NV: Tensor = self.model.project(hidden_ND[:, None])[:, 0]
        return logits_NV

    def clear(self) -> None:
        """Nothing in the caches is trusted any more."""
        self.context.clear()
        self.static.refresh("caches were cleared")
