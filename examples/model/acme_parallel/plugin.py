"""What the distribution offers: a family, its two components and a recipe. Torch-free."""

from __future__ import annotations

from intarsia.contracts import Entry, ModelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_models() -> list[ModelEntry]:
    """The family."""
    return [
        ModelEntry(
            name="parallel",
            config="acme_parallel.config:ParallelConfig",
            target="acme_parallel.model:Parallel",
            doc="Decoder whose attention and feed-forward layer read the same norm and are gated.",
            sharding="acme_parallel.sharding:TABLE",
        )
    ]


@hookimpl
def offer_components() -> list[Entry]:
    """The block, and the feed-forward layer, which any family's config may name."""
    return [
        Entry(
            name="parallel_block",
            config="acme_parallel.config:ParallelBlockConfig",
            target="acme_parallel.model:ParallelBlock",
            doc="Gated parallel residual block.",
        ),
        Entry(
            name="squared_relu",
            config="acme_parallel.config:SquaredReLUConfig",
            target="acme_parallel.model:SquaredReLU",
            doc="Feed-forward layer down(relu(up x)^2).",
        ),
    ]


@hookimpl
def offer_recipes() -> list[Entry]:
    """A run of seconds."""
    return [Entry(name="parallel/debug", target="acme_parallel.recipes:debug", doc="27,000 parameters on the standard library's source.")]
