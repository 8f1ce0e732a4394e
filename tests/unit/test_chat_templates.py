"""The tokenizer `templated`: mistakes say what and where, templates run within bounds, and documents with tools become ids."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
from intarsia.contracts import Document, Media, Message, ToolCall, ToolSpec
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_chat.config import TemplatedConfig
from intarsia_chat.contracts import ChatTemplate
from intarsia_chat.conversation import Conversation
from intarsia_chat.jinja import CompiledTemplate
from intarsia_chat.tokenizer import TemplatedTokenizer, find_template
from intarsia_data.config import ByteTokenizerConfig
from intarsia_data.records import to_document
from intarsia_data.store import tokenise
from intarsia_data.tokenizer import ByteTokenizer

IM = ("<|im_start|>", "<|im_end|>")
BYTES = ByteTokenizerConfig(specials=(*IM, "<think>", "</think>"))
START, END, THINK, THOUGHT = 264, 265, 266, 267


def templated(template: str = "chatml", tokenizer: ByteTokenizerConfig = BYTES, **settings: Any) -> TemplatedTokenizer:
    return current().build(TemplatedConfig(tokenizer=tokenizer, template=template, **settings))


def run(text: str, count: int = 2, **variables: Any) -> str:
    messages = [{"role": "user", "content": f"c{number}"} for number in range(count)]
    return CompiledTemplate("mine", text, 100_000).render(messages, **variables)


# ---------------------------------------------------------------- the sandbox

BIG = "{% set a = 'x' * 90000 %}"
GROW = "{%% set ns = namespace(l=[]) %%}{%% for i in range(60000) %%}{%% set ns.l = ns.l + %s %%}{%% endfor %%}"
"""A list that grows by something large each time."""
NESTED = "{%% set ns = namespace(x=1) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}%s"
"""A value that holds itself twice, sixty times over: small to keep, and endless to look through."""
VARARGS = "{% set ns = namespace(x=1) %}{% macro m() %}{% set ns.x = varargs %}{% endmacro %}{% for i in range(60) %}{{ m(ns.x, ns.x) }}{% endfor %}"
IN_ALL = r"makes and looks through more than 16,777,216 characters in all"
TOO_LONG, WITHIN = rf"longer than the 100,000|{IN_ALL}", rf"does not end within|{IN_ALL}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\n{% for m in messages %}\n{{ m.content.nothing.more }}{% endfor %}", r"mine, line 3, message 1 of 2: .*nothing"),
        ("{% for m in messages %}{{ raise_exception('no ' ~ m.content) if loop.last }}{% endfor %}", r"line 1, message 2 of 2: no c1\."),
        ("a\n{% if %}", r"mine, line 2: Expected an expression"),
        ("{{ 1|nope }}", r"No filter named 'nope'"),
        ("{{ ''.__class__.__mro__ }}", r"may not have"),
        ("{{ messages.append(1) }}", r"may not have"),
        ("{{ 'a'.ljust(1000000000000) }}", r"may not have"),
        ("{{ '{:1000000000000}'.format(1) }}", r"may not have"),
        ("{{ '%1000000000000d' % 1 }}", r"formatting by %"),
        ("{{ 2 ** 1000000000 ** 10 }}", r"powers"),
        ("{{ 'a' * 1000000000000 }}", r"longer than 100,000"),
        ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", TOO_LONG),
        ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", r"longer than 100,000"),
        ("{{ ('a'|replace('a', 'b' * 90000)) | replace('b', 'cc') }}", r"longer than 100,000"),
        ("{{ 'a'.replace('a', 'b' * 90000).replace('b', 'cc') }}", r"longer than 100,000"),
        ("{{ (['a' * 90000] * 90000) | join }}", TOO_LONG),
        ("{{ ','.join(['a' * 90000] * 90000) }}", TOO_LONG),
        ("{{ (['a' * 90000] * 90000) | tojson }}", TOO_LONG),
        ("{{ messages | tojson(indent=100000000) }}", r"indent=100000000"),
        ("{% for i in range(90000) %}{{ 'ab' }}{% endfor %}", r"its text is longer"),
        ("{% set r = range(90000)|list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}", WITHIN),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", r"calls itself too often"),
        (f"{BIG}{{% set b %}}{{% for i in range(1000) %}}{{{{ a }}}}{{% endfor %}}{{% endset %}}", TOO_LONG),
        (
            f"{BIG}{{% macro m() %}}{{% for i in range(1000) %}}{{{{ a }}}}{{% endfor %}}{{% endmacro %}}{{{{ m()|length }}}}",
            TOO_LONG,
        ),
        (f"{BIG}{GROW % '[a ~ i]'}", IN_ALL),
        (f"{BIG}{GROW % '[a[i:]]'}", IN_ALL),
        (f"{BIG}{GROW % '[a|upper]'}", IN_ALL),
        (f"{BIG}{GROW % '[a.upper()]'}", IN_ALL),
        (f"{BIG}{GROW % '[a|list]'}", TOO_LONG),
        (f"{BIG}{{% macro m() %}}{{{{ a }}}}{{% endmacro %}}{GROW % '[m()]'}", IN_ALL),
        ("{% for i in range(90000) %}{% set x = range(90000)|list|sort %}{% endfor %}", IN_ALL),
        ("{% set r = range(3000)|list %}{% for i in range(9000) %}{% set x = r|select('in', r)|list|length %}{% endfor %}", IN_ALL),
        ("{% set r = range(3000)|list %}{% for i in range(9000) %}{{ '' if r == range(3000)|list }}{% endfor %}", IN_ALL),
        ("{% set r = range(3000)|list %}{% for i in range(9000) %}{{ '' if -1 in r }}{% endfor %}", IN_ALL),
        (NESTED % ("[ns.x, ns.x]", "{{ ns.x == 1 }}"), TOO_LONG),
        (NESTED % ("(ns.x, ns.x)", "{{ [ns.x]|unique|list }}"), TOO_LONG),
        (NESTED % ("{'a': ns.x, 'b': ns.x}", "{{ 1 == ns.x }}"), TOO_LONG),
        (NESTED % ("dict(a=ns.x, b=ns.x)", ""), TOO_LONG),
        (VARARGS, TOO_LONG),
        ("{% set n = namespace(x=10) %}{% for i in range(9000) %}{% set n.x = n.x * n.x %}{% endfor %}", r"numbers of more than"),
        ("{% for i in range(90000) %}{% set x = [" + "i," * 3000 + "] %}{% endfor %}", WITHIN),
        ("{% include 'other' %}", r"another template \('other'\)"),
        ("{% import 'os' as os %}", r"another template"),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, r"mine is no template that can run: too many statically nested"),
        ("{% if a %}" * 120 + "{% endif %}" * 120, r"mine is no template that can run: too many levels"),
        ("{{ dict(a=1, a=2) }}", r"mine is no template that can run: keyword argument repeated"),
        ("{% break %}", r"mine is no template that can run: .*break"),
        ("{{ " + "9" * 5000 + " }}", r"mine cannot be read: ValueError"),
        ("{{ 1|round(-999999999) }}", r"round\(-999999999\) is out of range"),
        ("{{ 1.5|round(999999999, 'floor') }}", r"round\(999999999\) is out of range"),
        ("{{ ('f' * 90000)|int(base=16) }}", r"90,000 characters is to be a number"),
        (
            "{% set n = namespace(x=1) %}{% for i in range(9000) %}{% set n.x = n.x + n.x %}{% endfor %}",
            r"\+ would make numbers of more than",
        ),
        (
            "{% set n = namespace(x=1) %}{% for i in range(9000) %}{% set n.x = n.x - -n.x %}{% endfor %}",
            r"- would make numbers of more than",
        ),
        (f"{BIG}{{% for i in range(9000) %}}{{{{ '' if 'b' in a }}}}{{% endfor %}}", IN_ALL),
        (f"{BIG}{{% set b = 'x' * 90000 %}}{{% for i in range(9000) %}}{{{{ '' if a != b }}}}{{% endfor %}}", IN_ALL),
        (f"{BIG}{{% for i in range(9000) %}}{{{{ '' if a is upper }}}}{{% endfor %}}", IN_ALL),
        (f"{BIG}{{% set b = 'y' * 90000 %}}{{% for i in range(9) %}}{{% set c = a.strip(b) %}}{{% endfor %}}", IN_ALL),
    ],
)
def test_what_a_template_may_not_do(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run(text)


@pytest.mark.parametrize("around", ["{%% for m in messages[:1] %%}%s{%% endfor %%}", "{%% block b %%}%s{%% endblock %%}", "%s"])
def test_methods_of_texts_are_there_in_loops_and_blocks(around: str) -> None:
    assert (
        run(around % "{% set c = 'a-b' %}{{ c.replace('-', '+') }}{{ ','.join([c, c]) }}{{ c.replace('a', 'x', 1).upper() }}")
        == "a+ba-b,a-bX-B"
    )


def test_numbers_are_reckoned_with_as_far_as_templates_do() -> None:
    assert run(
        "{{ 2.345|round(1) }} {{ 1234|round(-2) }} {{ '12'|int + 3 - 1 }} {{ '0x1f'|int(base=16) }} {{ 'a'|int(7) }} {{ '1.5'|float }}"
    ) == ("2.3 1200 14 31 7 1.5")


@pytest.mark.parametrize("name", ["chatml", "qwen3", "qwen3_5"])
def test_a_conversation_as_long_as_may_be_is_within_what_templates_look_through(name: str) -> None:
    tokenizer = templated(name, characters=100_000)
    tokens, trained = tokenizer.render([Message("user", "a" * 45_000), Message("assistant", "b" * 45_000)])
    assert len(tokens) > 90_000 and sum(trained) > 45_000


def test_tools_and_calls_are_no_deeper_than_templates_write() -> None:
    def deep(levels: int) -> dict[str, Any]:
        return json.loads('{"a":' * levels + "1" + "}" * levels)

    asked, tokenizer = Message("user", "a"), templated()
    tokenizer.render([asked], [ToolSpec("f", "", deep(90))])
    for levels in (150, 400, 900):
        with pytest.raises(UsageError, match=r"nested in more than 100 levels"):
            tokenizer.render([asked], [ToolSpec("f", "", deep(levels))])
        with pytest.raises(UsageError, match=r"nested in more than 100 levels"):
            tokenizer.render([asked, Message("assistant", "", tool_calls=(ToolCall("1", "f", json.dumps(deep(levels))),))])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("[]", "has neither"),
        ("null", "has neither"),
        ('"x"', "has neither"),
        ('{"chat_template": [{"name": [], "template": "x"}]}', "has neither"),
        ("[" * 100_000, "is not valid JSON"),
        (r'{"chat_template": "\ud800"}', "the template has a lone surrogate"),
    ],
)
def test_a_folder_whose_settings_hold_no_template(tmp_path: Path, settings: str, says: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(settings)
    tokenizer: Any = ByteTokenizer(BYTES)
    tokenizer.path = tmp_path / "tokenizer.json"
    with pytest.raises(UsageError, match=says):
        find_template("folder", tokenizer, current())


def test_special_tokens_in_the_id_of_a_call_are_text(tmp_path: Path) -> None:
    path = tmp_path / "ids.jinja"
    path.write_text(
        "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ ':' ~ m.content }}{% for call in m.tool_calls or [] %}{{ call.id }}{% endfor %}"
        "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"
    )
    tokenizer = templated(str(path))
    call = ToolCall("<|im_end|>", "f", "{}")
    ids, _ = tokenizer.render([Message("user", "a"), Message("assistant", "b", tool_calls=(call,))])
    assert ids.count(END) == 2 and tokenizer.decode(ids).endswith("b<|im_end|>")


def test_namespaces_of_namespaces_write_nothing_out() -> None:
    assert "Namespace" in run(NESTED % ("namespace(a=ns.x, b=ns.x)", "{{ ns.x }}"))


def test_threads_that_share_a_template_have_budgets_of_their_own() -> None:
    entered, go = threading.Event(), threading.Event()

    class Waits(dict[str, Any]):
        def get(self, *_: Any) -> None:
            entered.set()
            go.wait(600)

    template = CompiledTemplate("mine", "{{ x.get('a') }}{% for m in messages %}{% for i in range(900) %}{% endfor %}{% endfor %}", 100_000)
    done: list[str] = []
    many = [{"role": "user", "content": ""}] * 300
    thread = threading.Thread(target=lambda: done.append(template.render(many, x=Waits())))
    thread.start()
    assert entered.wait(600)
    template.render([], x={})  # may do less, and nothing of it is the other's
    go.set()
    thread.join(600)
    assert done == ["None"]


def test_what_a_template_may_do() -> None:
    assert run("{% for m in messages %}{{ m['content'] | upper }}{{ ', ' if not loop.last }}{% endfor %}") == "C0, C1"
    assert run("{{ {'b': '<é>', 'a': [1, none]} | tojson }}") == '{"b": "<é>", "a": [1, null]}'
    assert run("{% for k, v in {'a': 1} | items %}{{ k ~ v }}{% break %}{% endfor %}{{ messages[::-1][0].content }}") == "a1c1"
    assert run("{% generation %}{{ 'said' }}{% endgeneration %}{{ unknown is defined }}{{ x }}", x=3) == "saidFalse3"
    assert run("{{ cycler }}{{ lipsum }}{{ self }}").count("<TemplateReference") == 1


def test_the_date_is_the_settings() -> None:
    text = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'none' }}"
    assert CompiledTemplate("d", text, 100).render([]) == "none"
    assert CompiledTemplate("d", text, 100, "2026-03-04").render([]) == "04 Mar 2026"
    with pytest.raises(UsageError, match="is no day"):
        CompiledTemplate("d", text, 100, "yesterday")
    llama = ByteTokenizerConfig(specials=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"))
    assert "Today Date: 04 Mar 2026" in (ours := templated("llama3", llama, date="2026-03-04")).decode(
        ours.render([Message("user", "q")])[0]
    )


# ---------------------------------------------------------------- templates and tokenizers


def test_a_tokenizer_without_the_special_tokens() -> None:
    with pytest.raises(
        UsageError, match=r"qwen3 needs the special tokens '<\|im_start\|>', '<\|im_end\|>'.*data.tokenizer.tokenizer.specials"
    ):
        templated("qwen3", ByteTokenizerConfig())
    with pytest.raises(UsageError, match=r"llama3 needs .*<\|start_header_id\|>"):
        templated("llama3")


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match=r"unknown chat template 'qwen4'.*qwen3"):
        templated("qwen4")
    with pytest.raises(UsageError, match=r"unknown tool format 'hermse'.*hermes"):
        templated(tool_format="hermse")
    with pytest.raises(UsageError, match=r"nowhere.jinja cannot be read"):
        templated("nowhere.jinja")
    with pytest.raises(UsageError, match=r"ByteTokenizer has none"):
        templated("folder")
    with pytest.raises(UsageError, match="is templated, too"):
        current().build(TemplatedConfig(tokenizer=TemplatedConfig(tokenizer=BYTES, template="chatml"), template="chatml"))


class Folder:
    def __init__(self, path: Path):
        self.path = path / "tokenizer.json"


def test_the_template_of_a_folder(tmp_path: Path) -> None:
    tokenizer: Any = Folder(tmp_path)
    with pytest.raises(UsageError, match=r"has neither a chat_template\.jinja nor a chat_template"):
        find_template("folder", tokenizer, current())
    beside = tmp_path / "tokenizer_config.json"
    beside.write_text("{")
    with pytest.raises(UsageError, match="is not valid JSON"):
        find_template("folder", tokenizer, current())
    beside.write_text(json.dumps({"chat_template": "one <function="}))
    assert (found := find_template("folder", tokenizer, current())).text == "one <function=" and found.tool_format == "qwen_xml"
    beside.write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d <tool_call>"}]})
    )
    assert (found := find_template("folder", tokenizer, current())).text == "d <tool_call>" and found.tool_format == "hermes"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert (found := find_template("folder", tokenizer, current())).text == "own" and found.tool_format is None


HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ 'assistant: ' if add_generation_prompt }}",
            "by no special token",
        ),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}<|im_end|>{% endfor %}", "assistant's content 2 times"),
        ("{% for m in messages %}{% endfor %}", "assistant's content 0 times"),
        ("{{ 'x' if add_generation_prompt }}" + HEAD, "writes something else before"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)
def test_templates_whose_turns_cannot_be_told(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Conversation(ChatTemplate("mine", text), ByteTokenizer(BYTES), {}, 1 << 20)


def test_a_template_without_a_generation_prompt() -> None:
    """The assistant speaks behind the user's closing mark, as in templates of the Mistral models."""
    text = "{% for m in messages %}{{ '<u>' ~ m.content ~ '</u>' if m.role == 'user' else m.content ~ '</s>' }}{% endfor %}"
    tokenizer = ByteTokenizer(ByteTokenizerConfig(specials=("<u>", "</u>", "</s>")))
    ours = Conversation(ChatTemplate("mine", text), tokenizer, {}, 1 << 20)
    messages = [Message("user", "a</u>"), Message("assistant", "b"), Message("user", "c")]
    assert ours.render(messages) == ([264, *b"a</u>", 265, *b"b", 266, 264, *b"c", 265], [False] * 7 + [True] * 2 + [False] * 3)
    assert ours.prompt(messages) == ours.render(messages)[0]
    with pytest.raises(UsageError, match="writes 3 turns of the assistant for a conversation with 2"):
        ours.render([*messages, Message("user", "d"), Message("assistant", "e")])


# ---------------------------------------------------------------- conversations


def test_reasoning_of_a_tokenizer_whose_markers_are_special() -> None:
    """The assistant's own markers are tokens; a user's are text."""
    ours = templated("qwen3")
    ids, mask = ours.render([Message("user", "a</think>b"), Message("assistant", "<think>\nr\n</think>\n\nc")])
    spoken = [THINK, *b"\nr\n", THOUGHT, *b"\n\nc", END]
    assert [number for number, trained in zip(ids, mask, strict=True) if trained] == spoken
    assert ids == [START, *b"user\na</think>b", END, *b"\n", START, *b"assistant\n", *spoken, *b"\n"]


def test_mistakes_in_conversations() -> None:
    ours = templated("qwen3")
    user = Message("user", "q")
    cases = [
        ([user, Message("assistant", "a", tool_calls=(ToolCall("1", "f", "[1]"),))], r"message 2 of 2: the arguments of its call are list"),
        (
            [user, Message("assistant", "a", tool_calls=(ToolCall("1", "f", "{"),))],
            r"message 2 of 2: the arguments of its call are no JSON",
        ),
        (
            [user, Message("assistant", "a", tool_calls=(ToolCall("1", "f", '{"a": "\\ud800"}'),))],
            r"message 2 of 2: the arguments of its call are no JSON: .*surrogates not allowed",
        ),
        ([Message("user", ("look", Media("image", b"")))], r"message 1 of 1: it holds a medium \(image\).*loader=multimodal"),
        ([Message("user", (9_999,))], r"token id 9999 is out of range"),
        ([user, Message("user", "x", trained=True)], r"message 2 of 2 is the user's and marked as trained on"),
        ([Message("user\nx", "q")], r"message 1 of 1: the role 'user\\nx' is none"),
        ([Message("narrator", "q")], r"qwen3, line \d+, message 1 of 1: there is no role \"narrator\""),
    ]
    for messages, says in cases:
        with pytest.raises(UsageError, match=says):
            ours.render(messages)
    with pytest.raises(UsageError, match=r"qwen3_5, line \d+.*no message is a question"):
        templated("qwen3_5").render([Message("assistant", "a")])
    with pytest.raises(UsageError, match=r"longer than"):
        templated(characters=2000).render([Message("user", "x" * 3000)])


def test_variables_and_fingerprints() -> None:
    plain, off = templated("qwen3"), templated("qwen3", thinking=False)
    assert off.prompt([Message("user", "q")])[-len(b"\n\n") - 1 :] == [THOUGHT, *b"\n\n"] and plain.prompt([Message("user", "q")])[-1:] == [
        *b"\n"
    ]
    assert templated("qwen3", variables={"enable_thinking": False}).fingerprint() == off.fingerprint()
    prints = {
        plain.fingerprint(),
        off.fingerprint(),
        templated("chatml").fingerprint(),
        templated("qwen3", date="2026-01-01").fingerprint(),
    }
    assert len(prints) == 4 and plain.fingerprint() == templated("qwen3").fingerprint()
    assert plain.render([]) == ([], [])
    assert (plain.special_id("<|im_end|>"), plain.special_id("<|eot_id|>"), plain.stop_ids) == (END, None, (END, 257))


class Source:
    def __init__(self, *documents: Document):
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Document:
        return self.documents[index]

    def fingerprint(self) -> str:
        return "source"


def test_records_with_tools_become_ids() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    record = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call, {"name": "now", "arguments": "{}"}]},
        ],
        "tools": [
            {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}},
            {"name": "now"},
        ],
    }
    document = to_document(record, "messages", "a.jsonl:1")
    assert document.tools == (ToolSpec("add", "Adds.", {"type": "object"}), ToolSpec("now", "", {}))
    assert document.messages is not None and document.messages[1].tool_calls == (
        ToolCall("a", "add", '{"a": 1}'),
        ToolCall("call-2", "now", "{}"),
    )
    ours = templated("chatml")
    ((ids, mask, _),) = tokenise(Source(document), ours, "source", range(1), numpy.dtype("uint16"))
    # The template begins and ends a conversation: neither bos nor eos is put around it.
    assert (ids.tolist(), mask.astype(bool).tolist()) == ours.render(document.messages, document.tools)
    assert bytes(int(number) for number in ids[mask == 1] if number < 256).count(b"<tool_call>") == 2
    wrong = [
        ({"tool_calls": {}}, "'tool_calls' must be a list of objects"), ({"tool_calls": [{"name": 1}]}, r"tool_calls\[0\] must have a name"),
    ]  # fmt: skip
    for fields, says in wrong:
        with pytest.raises(UsageError, match=says):
            to_document({"messages": [{"role": "assistant", "content": "a", **fields}]}, "messages", "a.jsonl:1")
    with pytest.raises(UsageError, match=r"tools\[0\] must have a name"):
        to_document({"messages": [{"role": "user", "content": "a"}], "tools": [{"description": "x"}]}, "messages", "a.jsonl:1")


def test_the_plugin_and_its_settings_are_light() -> None:
    program = "import sys, intarsia_chat.plugin, intarsia_chat.config, intarsia_chat.rl.config; print([m for m in ('torch', 'jinja2', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True).stdout.strip() == "[]"


def test_generation_takes_prompts_and_ends_of_the_template() -> None:
    from types import SimpleNamespace

    from intarsia_generation.generator import Generator

    ours = templated("qwen3")
    stand_in: Any = SimpleNamespace(tokenizer=ours)
    prompt, ends = Generator.encode_chat(stand_in, [Message("user", "q")])
    assert prompt == (START, *b"user\nq", END, *b"\n", START, *b"assistant\n") and ends == (END, 257)
    stand_in = SimpleNamespace(tokenizer=ByteTokenizer(ByteTokenizerConfig()))
    assert Generator.encode_chat(stand_in, [Message("user", "q")]) == ((256, 261, *b"q", 259, 262), (259,))
