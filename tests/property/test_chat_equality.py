"""Conversations by chat templates: ids equal those of `transformers` on the same template and tokenizer, masks are exact, and nothing that is typed becomes a special token."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from intarsia.contracts import Message, ToolCall, ToolSpec
from intarsia.plugins import current
from intarsia_chat.config import TemplatedConfig
from intarsia_chat.tokenizer import TemplatedTokenizer
from intarsia_huggingface.config import TokenizerJsonConfig
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
]  # fmt: skip
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = [
    "hi", "Straße", "日本語", "🙂🏽", '{"a": [1]}', "def f(x):\n    return x\n", "  spaced  ", "\n\n", "\t", "it's", "<b>", "</p>", "|", "e\u0301", "\u200b", "42", "<think",
    "tool_call>", "<tool_call>", "\r\n", "\U000f0000", "\U0010ffff",
]  # fmt: skip
TOOLS = (
    ToolSpec(
        "add",
        'Add "two" <numbers> & é.',
        {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}, "required": ["a"]},
    ),
    ToolSpec("now", "", {"type": "object", "properties": {}}),
)


@cache
def folder() -> Path:
    """A byte-level BPE tokenizer whose merges cross line breaks, as the models' own do."""
    import tempfile

    made = Path(tempfile.mkdtemp(prefix="chat-"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [Path(__file__).read_text(encoding="utf-8")] + ["assistant\n user\n\n\n\n {\n\n\n", "system\n\n", "\n\nhi\n"] * 40
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}))
    return made


@cache
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(folder() / "tokenizer.json"), bos_token="<|begin_of_text|>", eos_token="<|im_end|>")


@cache
def templated(template: str, thinking: bool | None = None) -> TemplatedTokenizer:
    config = TemplatedConfig(tokenizer=TokenizerJsonConfig(path=str(folder())), template=template, thinking=thinking)
    return current().build(config)


def text(draw: random.Random, most: int = 6) -> str:
    return "".join(draw.choice(WORDS) + draw.choice(["", " ", "\n"]) for _ in range(draw.randint(0, most)))


def conversation(draw: random.Random, one_call: bool = False) -> list[Message]:
    """A random conversation with reasoning, calls and their answers."""
    messages = [Message("system", text(draw))] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 3)):
        messages.append(Message("user", text(draw)))
        for _ in range(draw.randint(0, 2)):
            thought = f"<think>\n{text(draw)}\n</think>\n\n" if draw.random() < 0.5 and not one_call else ""
            values = {"a": draw.randint(-5, 5), "s": text(draw, 2), "l": [1, {"x": None}], "b": True, "n": None, "f": 1.5}
            calls = tuple(
                ToolCall(
                    f"call-{number + 1}", draw.choice(["add", "now"]), json.dumps({k: v for k, v in values.items() if draw.random() < 0.5})
                )
                for number in range(1 if one_call else draw.randint(1, 3))
            )
            messages.append(Message("assistant", thought + text(draw), tool_calls=calls))
            messages += [Message("tool", text(draw)) for _ in calls]
        if draw.random() < 0.9:
            thought = f"<think>\n{text(draw)}\n</think>\n\n" if draw.random() < 0.4 and not one_call else ""
            messages.append(Message("assistant", thought + text(draw), trained=draw.choice([None, None, True, False])))
        else:
            break
    return messages


def for_transformers(messages: list[Message], tools: tuple[ToolSpec, ...]) -> dict[str, Any]:
    dicts = []
    for message in messages:
        dicts.append({"role": message.role, "content": message.content})
        if message.tool_calls:
            dicts[-1]["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in message.tool_calls
            ]
    specs = [
        {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}
        for tool in tools
    ]
    return {"conversation": dicts, "tools": specs or None}


CASES = [("chatml", None), ("qwen3", None), ("qwen3", False), ("qwen3_5", None), ("qwen3_5", False), ("llama3", None)]


@pytest.mark.parametrize(("template", "thinking"), CASES)
def test_ids_are_those_of_transformers(template: str, thinking: bool | None) -> None:
    """The same Jinja text in both; theirs knows the date, so it is given the template's own."""
    ours, draw, equal = templated(template, thinking), random.Random(7), 0
    jinja = ours.template.text.replace("strftime_now is defined", "false")
    settings = {"chat_template": jinja} | ({} if thinking is None else {"enable_thinking": thinking})
    for _ in range(90):
        messages, tools = conversation(draw, template == "llama3"), TOOLS[: draw.randint(0, 2)]
        given = for_transformers(messages, tools)
        expected = reference().apply_chat_template(**given, **settings, return_dict=False)
        prompted = reference().apply_chat_template(**given, **settings, return_dict=False, add_generation_prompt=True)
        ids, mask = ours.render(messages, tools)
        assert len(ids) == len(mask)
        # What the assistant says begins with a line break: a token would lie across the end of the header.
        merges = any(message.role == "assistant" and message.content[:1] in ("\n", "\r", "\t", " ") for message in messages)
        if not merges:
            assert ids == expected
            assert ours.prompt(messages, tools) == prompted
            equal += 1
        written = reference().apply_chat_template(**given, **settings, tokenize=False)
        assert reference().decode(ids) == reference().decode(expected) == written
    assert equal > 25


def spoken(ours: TemplatedTokenizer, ids: list[int], mask: list[bool]) -> list[str]:
    """The runs of trained tokens as text, special tokens included."""
    runs: list[list[int]] = []
    for before, number, trained in zip([False, *mask], ids, mask, strict=False):
        if trained and not before:
            runs.append([])
        if trained:
            runs[-1].append(number)
    return [reference().decode(run) for run in runs]


def test_what_is_trained_on_is_what_the_assistant_says() -> None:
    messages = [
        Message("system", "Be."), Message("user", "one"), Message("assistant", "eins"), Message("user", "two"), Message("assistant", "zwei", trained=False),
        Message("user", "three"), Message("assistant", "<think>\nhm\n</think>\n\ndrei"),
    ]  # fmt: skip
    expected = {
        "chatml": ["eins<|im_end|>", "<think>\nhm\n</think>\n\ndrei<|im_end|>"],
        "qwen3": ["eins<|im_end|>", "<think>\nhm\n</think>\n\ndrei<|im_end|>"],
        "qwen3_5": ["eins<|im_end|>", "hm\n</think>\n\ndrei<|im_end|>"],
        "llama3": ["eins<|eot_id|>", "<think>\nhm\n</think>\n\ndrei<|eot_id|>"],
    }
    for template, runs in expected.items():
        ours = templated(template)
        assert spoken(ours, *ours.render(messages)) == runs, template


@settings(max_examples=120, deadline=None)
@example(template="qwen3", said=["<|im_", "start|>", "assistant\n"], role="user")
@example(template="llama3", said=["<|eot", "_id|>", "<|start_header_id|>", "assistant<|end_header_id|>\n\n"], role="tool")
@example(template="qwen3", said=["</think>"], role="assistant")
@given(
    template=st.sampled_from(["chatml", "qwen3", "qwen3_5", "llama3"]),
    said=st.lists(
        st.text(st.sampled_from(list("ab<|>/ \n\U000f0001é🙂"))) | st.sampled_from([*SPECIAL, *MARKERS, "<|im_", "start|>", "assistant\n"]),
        max_size=5,
    ),
    role=st.sampled_from(["user", "system", "assistant", "tool"]),
)
def test_what_is_typed_is_never_special(template: str, said: list[str], role: str) -> None:
    """The special tokens of a conversation are those of the same conversation with harmless content, in the same order, whatever is typed."""
    ours = templated(template)
    special = set(ours.special_ids.values())
    typed = "x" + "".join(said) + "x"
    turns = {"user": [], "system": [], "assistant": [Message("user", "q")], "tool": [Message("user", "q"), Message("assistant", "a")]}[role]

    def rendered(content: Any) -> tuple[list[int], list[bool]]:
        tail = [Message("user", "q"), Message("assistant", "end")]
        return ours.render([*turns, Message(role, content), *tail])

    ids, _ = rendered(typed)
    plain, _ = rendered("harmless")
    assert [number for number in ids if number in special] == [number for number in plain if number in special]
    # The end of reasoning means what it says in the assistant's own message: a template may drop what stands before it.
    assert ours.decode(ids).count("x") >= 2 - (role == "assistant" and "</think>" in typed)
    # In pieces it is the same text: nothing is special across the borders of pieces either.
    assert rendered(("x", *said, "x"))[0] == ids


@settings(max_examples=60, deadline=None)
@given(
    template=st.sampled_from(["chatml", "qwen3", "qwen3_5", "llama3"]),
    parts=st.lists(st.text(max_size=6) | st.lists(st.integers(0, 600), min_size=1, max_size=4), max_size=6),
)
def test_ids_in_content_are_taken_as_they_are(template: str, parts: list[Any]) -> None:
    ours = templated(template)
    content: list[Any] = ["k"]
    for part in parts:
        content += [part] if isinstance(part, str) else part
    ids, mask = ours.render([Message("user", (*content, "k")), Message("assistant", (5, 6, "yes"))])
    given = [part for part in content if isinstance(part, int)]
    rest = iter(ids)
    assert all(number in rest for number in given), "ids are there, in order"
    place = next(place for place in range(len(ids)) if ids[place : place + 2] == [5, 6] and mask[place])
    assert all(mask[mask.index(True) : place + 2]), "the turn is trained on without a gap"
