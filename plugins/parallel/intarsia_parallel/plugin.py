"""Offers the paralleliser `declared`, the roles, and the command `parallel`. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1

_CONFIG = "intarsia_parallel.config"
_ROLES = "intarsia_parallel.roles"


def _role(name: str, config: str, doc: str) -> Entry:
    return Entry(name=name, target=f"{_ROLES}.{name}:build", config=f"{_CONFIG}:{config}", doc=doc)


@hookimpl
def offer_roles() -> Sequence[Entry]:
    """The roles of sharding tables."""
    return [
        _role("column", "ColumnConfig", "A projection cut on its outputs."),
        _role("row", "RowConfig", "A projection cut on its inputs; its outputs are summed and cut along the sequence."),
        _role("vocab", "VocabConfig", "An embedding or output projection cut on the vocabulary, with its cross-entropy."),
        _role(
            "region", "RegionConfig", "A module that sees all tokens: gathered at its entry, summed and cut where its row projections end."
        ),
        _role("attention_heads", "AttentionHeadsConfig", "Attention cut by whole heads: a region whose heads are counted and checked."),
        _role("sequence", "SequenceConfig", "Works on the own part of the sequence with whole parameters."),
        Entry(
            name="media",
            target=f"{_ROLES}.media:Media",
            doc="A vision tower: run by every rank on all images of its rows, or on its share of them, or of all data-parallel ranks' (parallel.vision).",
        ),
        _role("replicated", "ReplicatedConfig", "Sees all tokens with whole parameters, and keeps the own part of the result."),
    ]


@hookimpl
def offer_parallelisers() -> Sequence[Entry]:
    """The paralleliser that a mesh takes unless the recipe says otherwise."""
    return [
        Entry(
            name="declared",
            config=f"{_CONFIG}:DeclaredConfig",
            target="intarsia_parallel.apply:build",
            doc="Cuts a family by its sharding table: tensor, sequence, context, expert and pipeline parallelism.",
        )
    ]


@hookimpl
def offer_commands() -> Sequence[Entry]:
    """`intarsia parallel check`."""
    return [
        Entry(
            name="parallel",
            target="intarsia_parallel.check_command:command",
            doc="Check that a family on a mesh computes what one process does.",
        )
    ]
