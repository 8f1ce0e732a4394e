"""What a policy said. Torch-free."""

from __future__ import annotations

from intarsia.contracts import Turn
from intarsia_data.tokenizer import text_of

REASONED = "</think>"


def said(turn: Turn) -> str:
    """The text of a turn behind its reasoning."""
    return text_of(turn.content).rpartition(REASONED)[2]
