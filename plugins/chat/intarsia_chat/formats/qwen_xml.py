"""The format `qwen_xml`: a call's parameters stand between tags of their own (Qwen3.5).

Values are written as they are: a text without quotes, true as True and null as None, objects and lists as JSON. What type one has says the tool's schema; of a tool that is not known what is
JSON is read as that, True, False and None as JSON's, and the rest as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.contracts import ToolCall, ToolSpec
from intarsia.errors import UsageError

from intarsia_chat.formats.between import CLOSE, OPEN, closed, read_calls
from intarsia_chat.formats.values import arguments_of, call_of, strict, to_json, tool_json

FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\n")
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n")
VALUE_ENDS, FUNCTION_ENDS = "\n</parameter>\n", "</function>"
CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
EXAMPLE = (
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n<parameter=example_parameter_2>\nThis is the value for the second "
    "parameter\nthat can span\nmultiple lines\n</parameter>\n</function>\n</tool_call>"
)


class QwenXML:
    """See ToolFormat."""

    name = "qwen_xml"

    def specs(self, tools: Sequence[ToolSpec]) -> str:
        """See ToolFormat."""
        lines = "".join(f"\n{tool_json(tool)}" for tool in tools)
        return (
            f"# Tools\n\nYou have access to the following functions:\n\n<tools>{lines}\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO "
            f"suffix:\n\n{EXAMPLE}\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within "
            "<tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n- You may provide optional reasoning for your function call in natural language BEFORE "
            "the function call, but NOT after\n- If there is no function call available, answer the question like normal with your current knowledge and do not tell the user "
            "about function calls\n</IMPORTANT>"
        )

    def calls(self, content: str, calls: Sequence[ToolCall]) -> str:
        """See ToolFormat."""
        written = "\n".join(self._call(call) for call in calls)
        return f"{content}\n\n{written}" if content and written else content + written

    def _call(self, call: ToolCall) -> str:
        made = [f"{OPEN}<function={call.name}>\n"]
        for key, value in arguments_of(call, self.name).items():
            text = value if isinstance(value, str) else to_json(value) if isinstance(value, dict | list) else str(value)
            if VALUE_ENDS.strip() in text or not PARAMETER.fullmatch(f"<parameter={key}>\n"):
                raise UsageError(
                    f"{self.name}: the call of {call.name!r} cannot be written: its parameter {key!r} holds what ends a parameter, or is no name."
                )
            made.append(f"<parameter={key}>\n{text}{VALUE_ENDS}")
        if not FUNCTION.fullmatch(f"<function={call.name}>\n"):
            raise UsageError(f"{self.name}: {call.name!r} cannot be written as a function's name.")
        return "".join([*made, FUNCTION_ENDS, CLOSE])

    def parse(self, text: str, tools: Sequence[ToolSpec] = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """See ToolFormat."""
        schemas = {tool.name: tool.parameters for tool in tools}

        def read(text: str, begin: int, number: int) -> tuple[ToolCall, int]:
            return _read(text, begin, number, schemas)

        return read_calls(text, read, "\n\n")


def _read(text: str, begin: int, number: int, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[ToolCall, int]:
    function = FUNCTION.match(text, begin)
    if function is None:
        raise ValueError("no function is named")
    name, position = function[1], function.end()
    properties = schemas[name].get("properties", {}) if name in schemas else None
    if not isinstance(properties, Mapping):  # of a schema that somebody else wrote
        properties = None
    arguments: dict[str, Any] = {}
    while parameter := PARAMETER.match(text, position):
        # A text may be empty: its line break is then that before the end.
        end = text.find(VALUE_ENDS, parameter.end() - 1)
        if end < 0 or parameter[1] in arguments:
            raise ValueError("a parameter does not end, or stands twice")
        value = text[parameter.end() : max(end, parameter.end())]
        schema = None if properties is None else properties.get(parameter[1], {})
        arguments[parameter[1]] = _value(value, schema)
        position = end + len(VALUE_ENDS)
    if not text.startswith(FUNCTION_ENDS, position):
        raise ValueError("the function does not end")
    return call_of(number, name, arguments), closed(text, position + len(FUNCTION_ENDS))


def _value(text: str, schema: Any) -> Any:
    """A parameter's value. ValueError where it is none of the types that it may have."""
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value, end = (CONSTANTS[text.strip()], 0) if text.strip() in CONSTANTS else strict(text.strip())
        if end and text.strip()[end:]:
            raise ValueError("something follows the value")
    except ValueError:
        if types and "string" not in types:
            raise
        return text
    if types and not any(_is(value, kind) for kind in types):
        if "string" in types:
            return text
        raise ValueError(f"the value is none of {sorted(types)}")
    return text if isinstance(value, str) and "string" in types else value


def _types(schema: Any) -> set[str]:
    """The types that a schema names; empty: any. What is no schema names none."""
    names: set[str] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        kind, enum = one.get("type"), one.get("enum")
        named = {item for item in ([kind] if isinstance(kind, str) else _listed(kind)) if isinstance(item, str)}
        options = [*_listed(one.get("anyOf")), *_listed(one.get("oneOf"))]
        if not named and not options and isinstance(enum, list | tuple) and all(isinstance(item, str) for item in enum):
            named = {"string"}
        names |= named
        waiting += options
    return names


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return isinstance(value, int | float) and not isinstance(value, bool) and (kind == "number" or whole)
    kinds: dict[str, type | tuple[type, ...]] = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}
    return isinstance(value, kinds.get(kind, object))
