"""Offers the generator `vllm`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl(optionalhook=True)
def offer_generators() -> Sequence[Entry]:
    """The generator."""
    return [
        Entry(
            name="vllm",
            config="intarsia_vllm.config:VllmConfig",
            target="intarsia_vllm.generator:build",
            doc="The vLLM engine, running this platform's own model.",
        )
    ]
