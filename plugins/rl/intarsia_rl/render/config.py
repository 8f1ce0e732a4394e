"""Settings of the renderer `chat`. Torch-free."""

from __future__ import annotations

import chz

from intarsia_rl.bases import RendererConfig


@chz.chz(typecheck=True)
class ChatConfig(RendererConfig):
    """Turns as the tokenizer's `render` marks them. Tools are described in the system turn; calls and reasoning stand between markers in the text."""

    call_open: str = chz.field(default="<tool_call>", doc="What stands before a tool call.")
    call_close: str = chz.field(default="</tool_call>", doc="What stands behind a tool call.")
    reasoning_open: str = chz.field(default="<think>", doc="What stands before reasoning, in which nothing is a tool call.")
    reasoning_close: str = chz.field(default="</think>", doc="What stands behind reasoning.")
    keep_reasoning: bool = chz.field(
        default=True,
        doc="Keep the reasoning of earlier turns in the context. false: it is dropped when the user speaks again, which begins a new segment.",
    )
    tool_role: str = chz.field(
        default="tool", doc="The tokenizer's role for answers of tools; user where its template has none of their own."
    )
