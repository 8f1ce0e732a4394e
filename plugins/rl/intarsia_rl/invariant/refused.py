"""What the batch-invariant mode has in the place of kernels of operators that it does not support: no model that it takes calls them."""

from __future__ import annotations

from typing import Any, NoReturn

from intarsia.errors import UsageError


def gated_delta_rule(*arguments: Any, **settings: Any) -> NoReturn:
    """UsageError."""
    raise UsageError(
        "The batch-invariant mode has no kernel for the operator gated_delta_rule: its sums depend on where in a chunk a token lies, and a generator's chunks begin elsewhere than a "
        "trainer's. Turn the mode off, or use a model without this mixer."
    )
