"""What a policy said. Torch-free."""

from __future__ import annotations

from intarsia.contracts import Turn

REASONED = "</think>"


def said(turn: Turn) -> str:
    """The text of a turn behind its reasoning."""
    text = turn.content if isinstance(turn.content, str) else "".join(part for part in turn.content if isinstance(part, str))
    return text.rpartition(REASONED)[2]
