"""Offers the command `generate`, the operator `paged_attention` and the generator `local`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_commands() -> Sequence[Entry]:
    """Text from a trained model."""
    return [
        Entry(
            name="generate",
            target="intarsia_generation.cli:command",
            doc="Write text with a run's, a checkpoint's or a Hugging Face folder's model.",
        )
    ]


@hookimpl
def offer_operators() -> Sequence[Entry]:
    """Attention as the embedded generator's caches lie."""
    return [
        Entry(
            name="paged_attention",
            target="intarsia_generation.paged:paged_attention",
            doc="Attention of new tokens over caches that lie in blocks.",
        )
    ]


@hookimpl(optionalhook=True)
def offer_generators() -> Sequence[Entry]:
    """The embedded generator, where reinforcement learning is installed."""
    return [
        Entry(
            name="local",
            config="intarsia_generation.engine.config:LocalConfig",
            target="intarsia_generation.engine.build:build",
            doc="The embedded generator: paged caches, continuous batching, prefix cache. On a CPU or GPU, or cut over several; needs nothing else.",
        )
    ]
