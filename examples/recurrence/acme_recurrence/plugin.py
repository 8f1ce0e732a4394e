"""What the distribution offers: a family, its mixer and a recipe. Torch-free."""

from __future__ import annotations

from intarsia.contracts import Entry, ModelEntry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def offer_models() -> list[ModelEntry]:
    """The family."""
    return [
        ModelEntry(
            name="toy_recurrence",
            config="acme_recurrence.config:ToyRecurrenceConfig",
            target="acme_recurrence.model:ToyRecurrence",
            doc="Decoder of gated linear recurrences and attention.",
            sharding="acme_recurrence.sharding:TABLE",
        )
    ]


@hookimpl
def offer_components() -> list[Entry]:
    """The mixer, which any family's config may name."""
    return [
        Entry(
            name="gated_recurrence",
            config="acme_recurrence.config:GatedRecurrenceConfig",
            target="acme_recurrence.model:GatedRecurrenceMixer",
            doc="Gated linear recurrence with a matrix of state for each head.",
        )
    ]


@hookimpl
def offer_recipes() -> list[Entry]:
    """A run of seconds."""
    return [
        Entry(
            name="toy_recurrence/debug", target="acme_recurrence.recipes:debug", doc="25,000 parameters on the standard library's source."
        )
    ]
