"""The format `hermes`: a call is a JSON object between markers (Qwen3 and many others)."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import ToolCall, ToolSpec

from intarsia_chat.formats.between import CLOSE, OPEN, closed, read_calls
from intarsia_chat.formats.values import arguments_of, behind_white, call_of, strict, to_json, tool_json


class Hermes:
    """See ToolFormat. A call has exactly `name` and `arguments`."""

    name = "hermes"

    def specs(self, tools: Sequence[ToolSpec]) -> str:
        """See ToolFormat."""
        lines = "".join(f"\n{tool_json(tool)}" for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>{lines}\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
            f'{OPEN}{{"name": <function-name>, "arguments": <args-json-object>}}{CLOSE}'
        )

    def calls(self, content: str, calls: Sequence[ToolCall]) -> str:
        """See ToolFormat."""
        written = [
            f'{OPEN}{{"name": {to_json(call.name)}, "arguments": {to_json(arguments_of(call, self.name))}}}{CLOSE}' for call in calls
        ]
        return "\n".join([content, *written] if content else written)

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """See ToolFormat."""
        return read_calls(text, _read, "\n")


def _read(text: str, begin: int, number: int) -> tuple[ToolCall, int]:
    begin = behind_white(text, begin)
    if not text.startswith("{", begin):  # a decoder would count the lines before it, for its message
        raise ValueError("a call is an object")
    value, end = strict(text, begin)
    if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
        raise ValueError("a call has a name and arguments")
    return call_of(number, value["name"], value["arguments"]), closed(text, end)
