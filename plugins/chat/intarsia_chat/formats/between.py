"""Calls between <tool_call> and </tool_call> in a turn: what the formats of the Qwen models share."""

from __future__ import annotations

from collections.abc import Callable

from intarsia.contracts import ToolCall

from intarsia_chat.formats.values import behind_white

OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
_OPEN = OPEN.strip()

ReadCall = Callable[[str, int, int], tuple[ToolCall, int]]
"""`read(text, begin, number)`: the call that begins behind <tool_call>, and the place behind its </tool_call>. ValueError where there is none."""


def read_calls(text: str, read: ReadCall, before_first: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text without its calls, and these. `before_first` is what stands between content and the first call; calls follow one another on lines of their own."""
    kept: list[str] = []
    calls: list[ToolCall] = []
    position = scanned = 0
    while (begin := text.find(_OPEN, scanned)) >= 0:
        try:
            call, end = read(text, begin + len(_OPEN), len(calls) + 1)
        except ValueError:
            scanned = begin + len(_OPEN)
            continue
        between = text[position:begin]
        if not calls:
            kept.append(between.removesuffix(before_first) if between != before_first else between)
        elif between != "\n":
            kept.append(between)
        calls.append(call)
        position = scanned = end
    return "".join([*kept, text[position:]]), tuple(calls)


def closed(text: str, end: int) -> int:
    """The place behind the </tool_call> that must follow, with nothing but white space before it. ValueError where it does not."""
    end = behind_white(text, end)
    if not text.startswith(CLOSE.strip(), end):
        raise ValueError("something else follows")
    return end + len(CLOSE.strip())
