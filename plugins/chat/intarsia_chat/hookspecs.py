"""The kinds of this distribution. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import offer


@offer("chat template")
def offer_chat_templates() -> Sequence[Entry]:
    """Chat templates, chosen by `data.tokenizer.template`. Target: `build() -> ChatTemplate` (`intarsia_chat.contracts`), in a module that imports no torch."""
    return ()


@offer("tool format")
def offer_tool_formats() -> Sequence[Entry]:
    """Ways to write tools and their calls as text. Target: `build() -> ToolFormat` (`intarsia_chat.contracts`), in a module that imports no torch."""
    return ()
