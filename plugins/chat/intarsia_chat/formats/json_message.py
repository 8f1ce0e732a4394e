"""The format `json_message`: a turn that is one JSON object is one call (Llama 3.1 to 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import ToolCall, ToolSpec
from intarsia.errors import UsageError

from intarsia_chat.formats.values import arguments_of, call_of, strict, to_json, tool_json


class JSONMessage:
    """See ToolFormat. A call has exactly `name` and `parameters`; beside it there is no content."""

    name = "json_message"

    def specs(self, tools: Sequence[ToolSpec]) -> str:
        """See ToolFormat. It stands in the user's first turn."""
        listed = "".join(f"{tool_json(tool, indent=4)}\n\n" for tool in tools)
        return (
            "Given the following functions, please respond with a JSON for a function call with its proper arguments that best answers the given prompt.\n\nRespond in the "
            f'format {{"name": function name, "parameters": dictionary of argument name and its value}}.Do not use variables.\n\n{listed}'
        )

    def calls(self, content: str, calls: Sequence[ToolCall]) -> str:
        """See ToolFormat."""
        if not calls:
            return content
        if len(calls) > 1 or content:
            raise UsageError(
                f"{self.name}: a turn with a call is that call and nothing else; this one has {len(calls)} calls and {len(content)} characters of content."
            )
        return f'{{"name": {to_json(calls[0].name)}, "parameters": {to_json(arguments_of(calls[0], self.name))}}}'

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """See ToolFormat."""
        try:
            value, end = strict(text.strip())
            if text.strip()[end:] or not isinstance(value, dict) or set(value) != {"name", "parameters"}:
                return text, ()
            return "", (call_of(1, value["name"], value["parameters"]),)
        except ValueError:
            return text, ()
