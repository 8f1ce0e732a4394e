"""Settings of the tokenizer `templated`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

import chz
from intarsia.config.bases import TokenizerConfig
from intarsia.config.values import Choice


@chz.chz(typecheck=True)
class TemplatedConfig(TokenizerConfig):
    """Another tokenizer, with conversations and tools as a chat template has them."""

    tokenizer: TokenizerConfig = chz.field(doc="The tokenizer of the text, which has the template's special tokens.")
    template: str = chz.field(
        doc="A chat template's name, `folder` for the one beside the tokenizer's files (chat_template.jinja, or in tokenizer_config.json), or the path of a .jinja file."
    )
    tool_format: str | None = chz.field(
        default=None, doc="How generated calls of tools are written; none: as the template's entry says; of a file, as its text looks."
    )
    thinking: bool | None = chz.field(default=None, doc="What the template is told as enable_thinking; none: nothing.")
    date: str | None = chz.field(
        default=None, doc="The day (YYYY-MM-DD) that a template is told which writes one; none: it has none, and takes its own."
    )
    variables: Mapping[str, Choice] = chz.field(default_factory=dict, doc="Further variables of the template.")
    characters: int = chz.field(default=1 << 24, doc="Longest text of a conversation, in characters.")
