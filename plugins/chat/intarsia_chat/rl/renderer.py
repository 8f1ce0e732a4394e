"""The renderer `template`: turns as a chat template writes them, around generated ids that are never touched. Torch-free.

A history is always rendered whole. A segment may go on where the new rendering begins with the old one, token by token, and with what was generated; where the template has rewritten what stood
there (reasoning of earlier turns dropped, say), a new segment begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Media, Message, Tokenizer, ToolSpec, Turn
from intarsia.errors import UsageError
from intarsia_data.tokenizer import text_of
from intarsia_rl.contracts import Finish

from intarsia_chat.formats.values import arguments_of
from intarsia_chat.rl.config import TemplateConfig
from intarsia_chat.tokenizer import TemplatedTokenizer


class TemplateRenderer:
    """A Renderer (`intarsia_rl.contracts`). One serves all episodes: of these it keeps nothing but the tools that it has seen, by which it reads the types of a call's arguments."""

    def __init__(self, tokenizer: TemplatedTokenizer):
        self._conversation, self._format = tokenizer.conversation, tokenizer.tool_format
        self._tools: dict[str, ToolSpec] = {}
        self.stop_ids = tokenizer.stop_ids

    def begin(self, turns: Sequence[Turn], tools: Sequence[ToolSpec]) -> list[int]:
        """See Renderer."""
        self._tools.update({tool.name: tool for tool in tools})
        messages = [self._message(turn, number) for number, turn in enumerate(turns)]
        said = {number: turn.tokens for number, turn in enumerate(turns) if turn.role == "assistant" and turn.tokens is not None}
        return self._conversation.with_ids(messages, tools, said)

    def extend(self, turns: Sequence[Turn], new: Sequence[Turn], tools: Sequence[ToolSpec], finish: Finish) -> list[int] | None:
        """See Renderer. `tools` are those that the context was begun with."""
        if not turns or turns[-1].role != "assistant" or turns[-1].tokens is None:
            return None
        before = [*self.begin(turns[:-1], tools), *turns[-1].tokens]
        after = self.begin([*turns, *new], tools)
        return after[len(before) :] if after[: len(before)] == before else None

    def parse(self, tokens: Sequence[int], finish: Finish) -> Turn:
        """The assistant's turn. Its content is the text without the calls, and with the reasoning, whose beginning the prompt may have held; in reasoning nothing is a call."""
        text = self._conversation.text_of(tokens)
        if self._format is None:
            return Turn("assistant", text, tokens=tuple(tokens))
        end = self._conversation.reasoning_end(text)
        content, calls = self._format.parse(text[end:], tuple(self._tools.values()))
        return Turn("assistant", text[:end] + content, tokens=tuple(tokens), tool_calls=calls)

    def _message(self, turn: Turn, number: int) -> Message:
        content = turn.content
        if not isinstance(content, str) and any(isinstance(part, Media) for part in content):
            raise UsageError(
                f"template renderer: turn {number + 1} holds an image, and this renderer takes ids. Set data.loader.processor, which makes them."
            )
        if not isinstance(content, str) and all(isinstance(part, str) for part in content):
            content = text_of(content)
        if turn.role == "assistant" and turn.tokens is not None:
            # The ids stand for the calls as well; the template only sees that there are some.
            content = self._conversation.text_of(turn.tokens)
            return Message("assistant", content, tool_calls=turn.tool_calls)
        for call in turn.tool_calls:
            arguments_of(call, f"template renderer: turn {number + 1}")
        return Message(turn.role, content, tool_calls=turn.tool_calls)


def build(config: TemplateConfig, tokenizer: Tokenizer) -> TemplateRenderer:
    """The renderer. UsageError for a tokenizer without a template."""
    if not isinstance(tokenizer, TemplatedTokenizer):
        raise UsageError(
            f"template renderer: {type(tokenizer).__name__} has no chat template. Set data.tokenizer=templated with this tokenizer in it (data.tokenizer.tokenizer=...) and a template "
            "(data.tokenizer.template=qwen3), or choose data.loader.renderer=chat."
        )
    return TemplateRenderer(tokenizer)
