"""What the two kinds of this distribution are. Torch-free values and a Protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from intarsia.contracts import ToolCall, ToolSpec

THINK = ("<think>", "</think>")


@dataclasses.dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template. Stability: provisional.

    `text` is Jinja, given `messages` (role, content, tool_calls as the `transformers` library gives them), `tools`, `add_generation_prompt` and the names of `bos_token` and
    `eos_token`. `special` are the special tokens that it cannot do without. `stops` end a generated turn besides the one that the template puts behind a turn, where the tokenizer has them.
    `tool_format` names the entry that generated calls are read by; None: none are. `reasoning` is what stands around reasoning in an assistant's content. `where` says in messages
    where the text is from.
    """

    name: str
    text: str
    special: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    tool_format: str | None = None
    reasoning: tuple[str, str] = THINK
    where: str = ""


@runtime_checkable
class ToolFormat(Protocol):
    """How tools and calls of tools are written. It has no state. Stability: provisional.

    `parse(calls(content, called), tools) == (content, called)` for content in which no call is written, with calls named call-1, call-2 ... whose arguments are written by `json.dumps`.
    """

    name: str

    def specs(self, tools: Sequence[ToolSpec]) -> str:
        """What a system turn says of tools."""

    def calls(self, content: str, calls: Sequence[ToolCall]) -> str:
        """An assistant's turn. UsageError for calls that this format cannot write so that they can be read again."""

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """The text without its calls, and these. What is no call, to the letter, stays text. `tools` say what types arguments have, where the format does not."""
