"""Offers the environments and their recipes. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_environments() -> Sequence[Entry]:
    """The environments."""
    rows = (
        ("arithmetic", "ArithmeticConfig", "arithmetic:build", "Sums and products, one turn."),
        ("alphabet_sort", "AlphabetSortConfig", "alphabet_sort:build", "Sort names that come in several turns."),
        ("code", "CodeConfig", "code:build", "Write a function; hidden tests run in a sandbox, whose errors come back."),
    )
    home = "intarsia_environments"
    return [Entry(name=name, config=f"{home}.config:{config}", target=f"{home}.{target}", doc=doc) for name, config, target, doc in rows]


@hookimpl
def offer_tokenizers() -> Sequence[Entry]:
    """The tokenizer."""
    return [
        Entry(
            name="characters",
            config="intarsia_environments.config:CharactersConfig",
            target="intarsia_environments.tokenizer:CharacterTokenizer",
            doc="One id for each character of a small alphabet.",
        )
    ]


@hookimpl
def offer_recipes() -> Sequence[Entry]:
    """Runs that a laptop does in minutes."""
    rows = (
        ("arithmetic/debug", "arithmetic_debug", "A small model learns sums from rewards."),
        ("alphabet_sort/debug", "alphabet_sort_debug", "A small model learns to sort in several turns from rewards."),
        ("code/debug", "code_debug", "A small model writes functions that tests judge."),
    )
    found = [Entry(name=name, target=f"intarsia_environments.recipes:{target}", doc=doc) for name, target, doc in rows]
    seeing = Entry(
        name="drawn/debug", target="intarsia_environments.seeing:drawn_debug", doc="A small model learns to name what it sees from rewards."
    )
    return [*found, seeing]
