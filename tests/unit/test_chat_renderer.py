"""The renderer `template`: generated ids stay, extensions are what a fresh rendering gives, and a template that rewrites begins a new segment."""

from __future__ import annotations

import random
from typing import Any

import pytest
from intarsia.contracts import Media, ToolSpec, Turn
from intarsia.contracts.environment import ToolCall
from intarsia.errors import UsageError
from intarsia.plugins import current
from intarsia_chat.config import TemplatedConfig
from intarsia_chat.rl.config import TemplateConfig
from intarsia_chat.rl.renderer import TemplateRenderer
from intarsia_data.config import ByteTokenizerConfig
from intarsia_rl.contracts import Renderer

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
IDS = {text: 264 + number for number, text in enumerate(SPECIAL)}
END, EOS = IDS["<|im_end|>"], 257
ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}})
QUESTION = Turn("user", "2+2?")


def renderer(template: str, **settings: Any) -> TemplateRenderer:
    tokenizer = current().build(TemplatedConfig(tokenizer=ByteTokenizerConfig(specials=SPECIAL), template=template, **settings))
    made = current().build(TemplateConfig(), tokenizer)
    assert isinstance(made, Renderer) and isinstance(made, TemplateRenderer)
    return made


def ids_of(text: str, end: int | None = END) -> tuple[int, ...]:
    """What a policy may say: markers as their tokens."""
    found: list[int] = []
    while text:
        special = next((name for name in SPECIAL if text.startswith(name)), None)
        found += [IDS[special]] if special else text[0].encode()
        text = text[len(special) :] if special else text[1:]
    return (*found, *(() if end is None else (end,)))


def text_of(ids: Any) -> str:
    names = {number: text for text, number in IDS.items()}
    return "".join(names[number] if number in names else chr(number) for number in ids if number != EOS)


def test_a_prompt_is_what_the_template_writes() -> None:
    made = renderer("qwen3_5")
    assert text_of(made.begin([QUESTION], ())) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert made.stop_ids == (END, EOS)
    assert "<tools>" in text_of(made.begin([QUESTION], (ADD,)))


@pytest.mark.parametrize("template", ["chatml", "qwen3", "qwen3_5"])
@pytest.mark.parametrize(
    ("tokens", "rest"),
    [(ids_of("four"), "\n"), (ids_of("fou", None), "<|im_end|>\n"), (ids_of("four", EOS), "<|im_end|>\n"), ((), "<|im_end|>\n")],
)
def test_a_conversation_goes_on_by_ids(template: str, tokens: tuple[int, ...], rest: str) -> None:
    """An answer of a tool follows: no template drops anything then."""
    made, answer = renderer(template), Turn("tool", "4")
    turn = made.parse(tokens, "eos")
    assert turn.tokens == tokens
    extension = made.extend([QUESTION, turn], [answer], (ADD,), "eos")
    assert extension is not None and text_of(extension).startswith(f"{rest}<|im_start|>")
    assert made.begin([QUESTION, turn, answer], (ADD,)) == [*made.begin([QUESTION], (ADD,)), *tokens, *extension]


def test_ids_that_no_tokenizer_would_give() -> None:
    """Bytes that are no text, markers in odd places, a special token in the middle: all stay."""
    odd = (0xFF, 0xC3, IDS["</think>"], IDS["<|im_start|>"], IDS["<tool_call>"], 7, END)
    for template in ("chatml", "qwen3", "qwen3_5"):
        made = renderer(template)
        turn = made.parse(odd, "eos")
        extension = made.extend([QUESTION, turn], [Turn("tool", "x")], (), "eos")
        assert extension is not None
        segment = [*made.begin([QUESTION], ()), *odd, *extension]
        assert segment == made.begin([QUESTION, turn, Turn("tool", "x")], ())


def test_dropped_reasoning_begins_a_new_segment() -> None:
    tokens, more = ids_of("<think>\nhm\n</think>\n\nfour"), [Turn("user", "sure?")]
    for template, keeps in (("chatml", True), ("qwen3", False)):
        made = renderer(template)
        turn = made.parse(tokens, "eos")
        assert turn.content == "<think>\nhm\n</think>\n\nfour"
        extension = made.extend([QUESTION, turn], more, (), "eos")
        begun = made.begin([QUESTION, turn, *more], ())
        assert (extension is not None) == keeps
        if not keeps:
            assert text_of(begun).startswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n<|im_start|>user")
        # Behind a tool's answer reasoning is kept by both.
        assert made.extend([QUESTION, turn], [Turn("tool", "4")], (), "eos") is not None


def test_a_prompt_that_opens_the_reasoning() -> None:
    made = renderer("qwen3_5")
    tokens = ids_of("hm\n</think>\n\nfour")
    turn = made.parse(tokens, "eos")
    assert turn.content == "<think>\nhm\n</think>\n\nfour"
    extension = made.extend([QUESTION, turn], [Turn("tool", "4")], (), "eos")
    assert extension is not None and made.begin([QUESTION, turn, Turn("tool", "4")], ()) == [
        *made.begin([QUESTION], ()),
        *tokens,
        *extension,
    ]
    assert made.extend([QUESTION, turn], [Turn("user", "sure?")], (), "eos") is None
    begun = text_of(made.begin([QUESTION, turn, Turn("user", "sure?")], ()))
    assert "<|im_start|>assistant\nfour<|im_end|>\n<|im_start|>user\nsure?" in begun and begun.endswith("<|im_start|>assistant\n<think>\n")
    # Reasoning that was cut off: all of it goes.
    cut = made.parse(ids_of("hm, 2", None), "length")
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nsure?" in text_of(made.begin([QUESTION, cut, Turn("user", "sure?")], ()))
    # A prompt that also closes it.
    off = renderer("qwen3_5", thinking=False)
    assert off.parse(ids_of("four"), "eos").content == "four"
    assert off.extend([QUESTION, off.parse(ids_of("four"), "eos")], [Turn("tool", "4")], (), "eos") is not None


@pytest.mark.parametrize("template", ["chatml", "qwen3", "qwen3_5", "llama3"])
def test_incremental_equals_fresh(template: str) -> None:
    """Random episodes, as the loop plays them: what an extension gives is what a fresh rendering has, and what was generated stands in it as it is."""
    draw, made, extended = random.Random(3), renderer(template), 0
    end = IDS["<|eot_id|>"] if template == "llama3" else END
    words = [
        "<think>\nr\n</think>\n\n",
        "a",
        "<|im_end|>x",
        "\n",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "é",
        " ",
        "</think>",
    ]
    for _ in range(30):
        history = [Turn("system", "S")] if draw.random() < 0.5 else []
        history.append(Turn("user", draw.choice(words)))
        segment = made.begin(history, (ADD,))
        said: list[tuple[int, ...]] = []
        for _ in range(3):
            spoken = "".join(draw.choice(words) for _ in range(draw.randint(0, 3))).replace("<|im_end|>", "")
            tokens = ids_of(spoken, draw.choice([end, end, None, EOS]))
            turn = made.parse(tokens, "eos")
            history.append(turn)
            segment += tokens
            said.append(tokens)
            new = [Turn(draw.choice(["user", "tool"]), draw.choice(words)) for _ in range(draw.randint(1, 2))]
            extension = made.extend(history, new, (ADD,), "eos")
            history += new
            begun = made.begin(history, (ADD,))
            if extension is None:
                segment, said = begun, []
            else:
                segment += extension
                extended += 1
            assert segment == begun
            place = 0
            for tokens in said:
                place = next(at for at in range(place, len(segment)) if tuple(segment[at : at + len(tokens)]) == tokens) + len(tokens)
    assert extended > 10


def test_calls_are_read_by_the_templates_format() -> None:
    hermes, xml, plain = renderer("qwen3"), renderer("qwen3_5"), renderer("llama3")
    turn = hermes.parse(
        ids_of('<think>\n<tool_call> or not\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'), "eos"
    )
    assert (turn.content, turn.tool_calls) == ("<think>\n<tool_call> or not\n</think>\n\nI add.", (ToolCall("call-1", "add", '{"a": 1}'),))
    call = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n2\n</parameter>\n</function>\n</tool_call>"
    xml.begin([QUESTION], (ADD,))
    turn = xml.parse(ids_of(f"hm\n</think>\n\n{call}"), "eos")
    assert turn.tool_calls == (ToolCall("call-1", "add", '{"a": 1, "s": "2"}'),) and turn.content == "<think>\nhm\n</think>\n\n"
    turn = plain.parse(ids_of('{"name": "add", "parameters": {"a": 1}}', IDS["<|eot_id|>"]), "eos")
    assert (turn.content, turn.tool_calls) == ("", (ToolCall("call-1", "add", '{"a": 1}'),))
    broken = hermes.parse(ids_of("<tool_call>\n{oops}\n</tool_call>"), "eos")
    assert (broken.content, broken.tool_calls) == ("<tool_call>\n{oops}\n</tool_call>", ())


def test_what_cannot_be_rendered() -> None:
    byte = current().build(ByteTokenizerConfig())
    with pytest.raises(UsageError, match="ByteTokenizer has no chat template"):
        current().build(TemplateConfig(), byte)
    made = renderer("qwen3")
    with pytest.raises(UsageError, match="turn 1 holds an image"):
        made.begin([Turn("user", ("look", Media("image", b"")))], ())
    with pytest.raises(UsageError, match="turn 1: the arguments of the call of 'f' are no JSON"):
        made.begin([Turn("assistant", "", tool_calls=(ToolCall("1", "f", "{"),))], ())
    assert made.extend([QUESTION], [QUESTION], (), "eos") is None
    assert made.begin([Turn("user", ("a", "b"))], ()) == made.begin([Turn("user", "ab")], ())
