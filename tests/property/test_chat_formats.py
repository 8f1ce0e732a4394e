"""Tool formats: what is written is read again, and what is no call to the letter stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from intarsia.contracts import ToolCall, ToolSpec
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_chat.contracts import ToolFormat
from intarsia_chat.templates import chatml, qwen3, qwen3_5

FORMATS: dict[str, ToolFormat] = {
    name: current().target(current().registry("tool format").find(name))() for name in ("hermes", "qwen_xml", "json_message")
}

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,12}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
pieces = st.lists(texts | st.sampled_from(["<tool_call>", "</tool_call>", "<function=x>\n", "{", '"name"', "\n"]), max_size=4).map("".join)
leaves = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6)
# Of content what is no call is kept to the letter; a call in it would be read as one.
contents = pieces.filter(lambda text: "<tool_call>" not in text)


def calls_of(found: list[tuple[str, dict[str, Any]]]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(f"call-{number + 1}", name, json.dumps(arguments, ensure_ascii=False)) for number, (name, arguments) in enumerate(found)
    )


@settings(max_examples=150, deadline=None)
@given(content=contents, found=st.lists(st.tuples(names, st.dictionaries(texts, values, max_size=3)), max_size=3))
def test_hermes_reads_what_it_writes(content: str, found: list[tuple[str, dict[str, Any]]]) -> None:
    hermes, calls = FORMATS["hermes"], calls_of(found)
    assert hermes.parse(hermes.calls(content, calls)) == (content, calls)


def type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array", dict: "object"}
    return kinds[type(value)]


@settings(max_examples=150, deadline=None)
@given(
    content=contents,
    found=st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3, unique_by=lambda item: item[0]),
)
def test_qwen_xml_reads_what_it_writes(content: str, found: list[tuple[str, dict[str, Any]]]) -> None:
    form, calls = FORMATS["qwen_xml"], calls_of(found)
    tools = [
        ToolSpec(name, "", {"type": "object", "properties": {key: {"type": type_of(value)} for key, value in arguments.items()}})
        for name, arguments in found
    ]
    try:
        written = form.calls(content, calls)
    except UsageError:
        assert any("</parameter>" in json.dumps(arguments) for _, arguments in found)
        return
    if not content.strip() and calls:  # the format has no border for content that is white space
        return
    assert form.parse(written, tools) == (content, calls)


@settings(max_examples=60, deadline=None)
@given(found=st.tuples(names, st.dictionaries(texts, values, max_size=3)))
def test_json_message_reads_what_it_writes(found: tuple[str, dict[str, Any]]) -> None:
    form, calls = FORMATS["json_message"], calls_of([found])
    assert form.parse(form.calls("", calls)) == ("", calls)


@settings(max_examples=300, deadline=None)
@given(text=pieces, name=st.sampled_from(["hermes", "qwen_xml", "json_message"]))
def test_any_text_is_read(text: str, name: str) -> None:
    content, calls = FORMATS[name].parse(text)
    assert calls or content == text


MALFORMED = {
    "hermes": [
        "<tool_call>\n{not json}\n</tool_call>", '<tool_call>\n{"name": "f"}\n</tool_call>', '<tool_call>\n{"name": "f", "arguments": []}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {}, "x": 1}\n</tool_call>', '<tool_call>\n{"name": "f", "arguments": {}}', '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>', '<tool_call>\n{"name": "f", "arguments": {"a": 1, "a": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {}} trailing\n</tool_call>', "<tool_call>" + "[" * 100_000, '{"name": "f", "arguments": {}}',
    ],
    "qwen_xml": [
        "<tool_call>\n<function=f>\n", "<tool_call>\n<function=f>\n</tool_call>", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>", "<tool_call>\n<function=f>\nx</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>", "<function=f>\n</function>",
    ],
    "json_message": ['{"name": "f", "parameters": {}} and more', '{"name": "f"}', "[]", '{"name": "f", "parameters": {}, "x": 1}', "I say {}"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_malformed_calls_stay_text(name: str, text: str) -> None:
    assert FORMATS[name].parse(text) == (text, ())
    assert FORMATS[name].parse(f"before {text} after")[1] == ()


def test_a_good_call_behind_a_malformed_one_is_read() -> None:
    good = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    content, calls = FORMATS["hermes"].parse(f"hm <tool_call>\n{{oops\n{good} end")
    assert content == "hm <tool_call>\n{oops end"
    assert calls == (ToolCall("call-1", "f", '{"a": 1}'),)


def test_types_of_parameters() -> None:
    schema = {
        "type": "object",
        "properties": {
            "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": ["integer", "null"]}, "e": {"enum": ["1", "2"]}, "o": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        },
    }  # fmt: skip
    tools = [ToolSpec("f", "", schema)]

    def read(key: str, value: str, tools: list[ToolSpec] = tools) -> Any:
        _, calls = FORMATS["qwen_xml"].parse(
            f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>", tools
        )
        return json.loads(calls[0].arguments)[key] if calls else "no call"

    assert [read("s", "42"), read("i", "42"), read("n", "None"), read("e", "1"), read("o", "7"), read("o", "x")] == [
        "42",
        42,
        None,
        "1",
        7,
        "x",
    ]
    assert [read("i", "many"), read("i", "1.5"), read("i", "True")] == ["no call"] * 3
    assert [read("other", "[1]"), read("other", "True"), read("other", "a b")] == [[1], True, "a b"]
    assert [read("s", ""), read("s", "a\nb"), read("s", "4", [])] == ["", "a\nb", 4]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"properties": "a"},
        {"properties": {"a": {"anyOf": None}}},
        {"properties": {"a": {"oneOf": 5}}},
        {"properties": {"a": {"type": {"a": 1}, "enum": None}}},
        {"properties": {"a": json.loads('{"anyOf":[' * 300 + "{}" + "]}" * 300)}},
    ],
)
def test_what_is_no_schema_names_no_types(schema: dict[str, Any]) -> None:
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert FORMATS["qwen_xml"].parse(text, [ToolSpec("f", "", schema)]) == ("", (ToolCall("call-1", "f", '{"a": 1}'),))


def test_whole_numbers_may_be_larger_than_any_float() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>"
    tools, large = [ToolSpec("f", "", {"properties": {"a": {"type": "integer"}}})], "1" * 400
    assert FORMATS["qwen_xml"].parse(text % large, tools)[1][0].arguments == f'{{"a": {large}}}'
    for no_number in ("1" * 5000, "1e999"):
        assert FORMATS["qwen_xml"].parse(text % no_number, tools) == (text % no_number, ())


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_how_deep_a_call_may_be_does_not_depend_on_who_reads_it(form: str) -> None:
    def said(depth: int) -> str:
        value = "[" * depth + "]" * depth
        return {
            "hermes": f'<tool_call>\n{{"name": "f", "arguments": {{"a": {value}}}}}\n</tool_call>',
            "qwen_xml": f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>",
            "json_message": f'{{"name": "f", "parameters": {{"a": {value}}}}}',
        }[form]

    tools = [ToolSpec("f", "", {"properties": {"a": {"type": "array"}}})]

    def far(levels: int, text: str) -> Any:
        return far(levels - 1, text) if levels else FORMATS[form].parse(text, tools)

    for depth in (90, 110, 900, 960, 970, 980, 990):
        found = far(0, said(depth))
        assert far(300, said(depth)) == found and bool(found[1]) == (depth < 100)
        if found[1]:
            FORMATS[form].calls("", found[1])


def test_templates_write_calls_and_tools_as_the_formats_do() -> None:
    """Jinja and Python say the same of tools and calls."""
    from intarsia_chat.jinja import CompiledTemplate

    tools = (ToolSpec("add", "Adds é.", {"type": "object", "properties": {"a": {"type": "integer"}}}), ToolSpec("now", "", {}))
    calls = (ToolCall("1", "add", '{"a": [1, "é"], "b": "x y", "c": true}'), ToolCall("2", "now", "{}"))
    specs = [
        {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}
        for tool in tools
    ]
    called = [{"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in calls]
    for template in (chatml(), qwen3(), qwen3_5()):
        form = FORMATS[str(template.tool_format)]
        for content in ("", "I look."):
            messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, "tool_calls": called}]
            text = CompiledTemplate(template.name, template.text, 1 << 20).render(messages, tools=specs, add_generation_prompt=False)
            assert f"<|im_start|>system\n{form.specs(tools)}<|im_end|>\n" in text
            assert f"{form.calls(content, calls)}<|im_end|>" in text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": ["\\ud800"]}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "\\udfff", "arguments": {}}\n</tool_call>'),
        ("qwen_xml", '<tool_call>\n<function=f>\n<parameter=a>\n["\\ud800"]\n</parameter>\n</function>\n</tool_call>'),
        ("json_message", '{"name": "f", "parameters": {"\\ud800": 1}}'),
    ],
)
def test_a_call_with_half_a_character_is_no_call(form: str, text: str) -> None:
    assert FORMATS[form].parse(text) == (text, ()), "nobody could encode what it says"


def test_the_same_half_in_data_is_told() -> None:
    call = ToolCall("call-1", "f", '{"a": "\\ud800"}')
    for form in FORMATS.values():
        with pytest.raises(UsageError, match=r"arguments of the call of 'f' are no JSON: .*surrogates not allowed"):
            form.calls("", (call,))


class Watched(str):
    """Counts the characters that are copied out of it, or looked through for lines as a decoder of JSON does for its message."""

    touched = 0

    def __getitem__(self, key: Any) -> str:
        found = super().__getitem__(key)
        Watched.touched += len(found)
        return found

    def count(self, *arguments: Any) -> int:
        Watched.touched += len(self) if len(arguments) < 3 else arguments[2] - arguments[1]
        return super().count(*arguments)


def test_a_text_of_nothing_but_beginnings_is_not_copied_for_each() -> None:
    text = Watched("<tool_call>" * 2_000)
    Watched.touched = 0
    assert FORMATS["hermes"].parse(text) == (text, ())
    assert Watched.touched <= 4 * len(text)
