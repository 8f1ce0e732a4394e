"""Is this the run that the checkpoint was made by? Differences that would make it another run stop a resume; others are told. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.checkpoint.facts import Difference
from intarsia.errors import UsageError


def check(differences: Sequence[Difference], allow_changes: bool, location: str) -> list[str]:
    """What to warn of. Raises UsageError, with both sides of each, for fatal differences unless they are allowed."""
    fatal = [difference for difference in differences if difference.level == "fatal"]
    if fatal and not allow_changes:
        lines = "\n".join(f"  {difference}" for difference in fatal)
        raise UsageError(
            f"{location} was made by another run than this:\n{lines}\n"
            "Undo the changes, or start a new run. If you know that they are right, say --allow-changes."
        )
    return [f"Resumed with a change: {difference}." for difference in differences if difference.level != "note"]
