"""The renderer `chat`: ids that were generated stay, whatever the tokenizer merges and the template rewrites."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from intarsia.contracts import Media, Message, ToolSpec, Turn
from intarsia.contracts.environment import ToolCall
from intarsia.errors import PluginError, UsageError
from intarsia_data.config import ByteTokenizerConfig
from intarsia_data.tokenizer import ByteTokenizer
from intarsia_rl.contracts import Renderer
from intarsia_rl.render.chat import ChatRenderer, build
from intarsia_rl.render.config import ChatConfig

BYTES = ByteTokenizer(ByteTokenizerConfig())
SYSTEM, USER, ASSISTANT, TOOL, END, BOS = 260, 261, 262, 263, 259, 256
ADD = ToolSpec("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}})


class Merging:
    """A tokenizer of letters that merges "ab" wherever it sees it, also across the borders of turns; a turn is `<`, the role's letter, the content, `>`, newline."""

    vocab_size, bos_id, eos_id, pad_id = 200, None, None, None
    ab = 150

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for letter in text:
            if letter == "b" and ids and ids[-1] == ord("a"):
                ids[-1] = self.ab
            else:
                ids.append(ord(letter))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("ab" if number == self.ab else chr(number) for number in ids)

    def render(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        ids = self.encode("".join(f"<{message.role[0]}{message.content}>\n" for message in messages))
        trained, mask = False, []
        turns = iter(messages)
        for place, number in enumerate(ids):
            if number == ord("<"):
                trained = False
                message = next(turns)
            mask.append(trained)
            if place and ids[place - 1] == ord("<") and number != self.ab:
                trained = bool(message.trained)
        return ids, mask

    def fingerprint(self) -> str:
        return "merging"


def chat(tokenizer=BYTES, **settings) -> ChatRenderer:
    return build(ChatConfig(**settings), tokenizer)


def generated(text: str, tokenizer=BYTES, end: Sequence[int] = (END,)) -> tuple[int, ...]:
    return (*tokenizer.encode(text), *end)


def test_a_conversation_is_what_the_tokenizer_renders():
    turns = [Turn("system", "Be."), Turn("user", "Hi")]
    assert chat().begin(turns, ()) == [BOS, *BYTES.render([Message("system", "Be."), Message("user", "Hi")])[0], ASSISTANT]
    assert isinstance(chat(), Renderer)
    assert chat().stop_ids == (END, 257)


@pytest.mark.parametrize(
    ("tokens", "rest"),
    [
        (generated("four"), []),
        (generated("fou", end=()), [END]),
        (generated("four", end=(257,)), [END]),
        ((), [END]),
    ],
)
def test_extension_is_what_a_new_rendering_gives(tokens, rest):
    renderer = chat()
    question, more = (Turn("user", "2+2"),), (Turn("user", "sure?"), Turn("tool", "4", tool_call_id="call-1"))
    answer = renderer.parse(tokens, "eos")
    assert answer.tokens == tokens
    extension = renderer.extend([*question, answer], more, (), "eos")
    assert extension == [*rest, USER, *b"sure?", END, TOOL, *b"4", END, ASSISTANT]
    assert renderer.begin([*question, answer, *more], ()) == [*renderer.begin(question, ()), *tokens, *extension]


def test_generated_ids_stay_where_the_tokenizer_would_merge_them():
    """The policy said "a", "b" as two ids; the tokenizer knows only "ab". The template has a newline behind the token that stops."""
    tokenizer = Merging()
    renderer = chat(tokenizer)
    assert renderer.stop_ids == (ord(">"),)
    said = (ord("a"), ord("b"), ord("a"), ord(">"))
    assert tokenizer.encode("aba>") != list(said)
    turns = [Turn("user", "xa"), renderer.parse(said, "eos")]
    assert turns[1].content == "aba"
    segment = [*renderer.begin(turns[:1], ()), *said]
    extension = renderer.extend(turns, [Turn("user", "b")], (), "eos")
    assert extension == tokenizer.encode("\n<ub>\n<a")
    segment += extension
    assert segment == renderer.begin([*turns, Turn("user", "b")], ())
    start = len(renderer.begin(turns[:1], ()))
    assert tuple(segment[start : start + len(said)]) == said


def test_cut_turns_merge_with_nothing():
    """A turn cut at its last token is ended by the template's whole end, and the next turn's text merges with nothing before it."""
    renderer = chat(Merging())
    turns = [Turn("user", "x"), renderer.parse((ord("a"),), "length")]
    assert renderer.extend(turns, [Turn("user", "b")], (), "length") == [ord(letter) for letter in ">\n<ub>\n<a"]


def test_dropped_reasoning_begins_a_new_segment():
    renderer = chat(keep_reasoning=False)
    said = generated("<think>hm, 2+2</think>\n4")
    turns = [Turn("user", "2+2"), renderer.parse(said, "eos")]
    assert renderer.extend(turns, [Turn("tool", "ok", tool_call_id="call-1")], (), "eos") is not None
    new = [Turn("user", "and 3+3")]
    assert renderer.extend(turns, new, (), "eos") is None
    assert renderer.begin([*turns, *new], ()) == [BOS, USER, *b"2+2", END, ASSISTANT, *b"4", END, USER, *b"and 3+3", END, ASSISTANT]
    # What was dropped once is not dropped again: the next turn without reasoning only extends.
    plain = renderer.parse(generated("6"), "eos")
    assert renderer.extend([*turns, *new, plain], [Turn("user", "ok")], (), "eos") == [USER, *b"ok", END, ASSISTANT]


def test_reasoning_is_kept_by_default():
    turns = [Turn("user", "2+2"), chat().parse(generated("<think>hm</think>4"), "eos")]
    assert chat().extend(turns, [Turn("user", "and")], (), "eos") == [USER, *b"and", END, ASSISTANT]


def test_dropped_reasoning_with_tools_and_no_system_turn():
    """The system turn that only holds tools does not shift which turns are earlier ones."""
    renderer = chat(keep_reasoning=False)
    one, two = (renderer.parse(generated(f"<think>hm</think>{text}"), "eos") for text in ("4", "6"))
    ids = renderer.begin([Turn("user", "a"), one, Turn("user", "b"), two], [ADD])
    assert BYTES.decode(ids).count("<think>hm</think>6") == 1 and "hm</think>4" not in BYTES.decode(ids)


def test_reasoning_inside_a_merged_token_is_dropped_by_text():
    """A token that holds the end of the reasoning and the beginning of the answer is encoded anew: it is context and never trained on."""
    tokenizer = Merging()
    renderer = chat(tokenizer, keep_reasoning=False, reasoning_open="[", reasoning_close="a")
    said = (ord("["), ord("x"), tokenizer.ab, ord("c"), ord(">"))
    turns = [Turn("user", "x"), renderer.parse(said, "eos"), Turn("user", "y")]
    assert tokenizer.decode(renderer.begin(turns, ())) == "<ux>\n<abc>\n<uy>\n<a"


def test_reasoning_that_never_ends_is_dropped_whole():
    renderer = chat(keep_reasoning=False)
    turns = [Turn("user", "x"), renderer.parse(generated("so <think>and on", end=()), "length"), Turn("user", "y")]
    assert renderer.begin(turns, ()) == [BOS, USER, *b"x", END, ASSISTANT, *b"so ", END, USER, *b"y", END, ASSISTANT]


def test_tools_stand_in_the_system_turn():
    text = BYTES.decode(chat().begin([Turn("user", "x")], [ADD]))
    assert '{"name": "add", "description": "Add.", "parameters": {"type": "object"' in text
    assert '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>' in text
    ids = chat().begin([Turn("system", "Be."), Turn("user", "x")], [ADD])
    assert ids.count(SYSTEM) == 1 and BYTES.decode(ids).startswith("Be.\n\nTools:")
    assert chat().begin([Turn("user", "x")], [ADD])[1] == SYSTEM


def test_calls_are_parsed():
    turn = chat().parse(
        generated(
            'I add.<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call> and <tool_call> {"name": "b"} </tool_call>.'
        ),
        "eos",
    )
    assert turn.content == "I add. and ."
    assert turn.tool_calls == (ToolCall("call-1", "add", '{"a": "</tool_call>"}'), ToolCall("call-2", "b", "{}"))
    assert turn.role == "assistant" and turn.tokens[-1] == END


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        '<tool_call>{"name": "add"',
        '<tool_call>{"name": "add", "arguments": {}}',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<think><tool_call>{"name": "add", "arguments": {}}</tool_call></think>no',
        '<think>endless <tool_call>{"name": "add", "arguments": {}}</tool_call>',
    ],
)
def test_what_is_no_call_stays_text(text):
    turn = chat().parse(generated(text), "eos")
    assert turn.content == text and turn.tool_calls == ()


def test_a_call_behind_reasoning_and_a_broken_one():
    turn = chat().parse(generated('<think>hm</think><tool_call>{<tool_call>{"name": "add", "arguments": "{\\"a\\": 1"}</tool_call>'), "eos")
    assert turn.content == "<think>hm</think><tool_call>{"
    assert turn.tool_calls == (ToolCall("call-1", "add", '{"a": 1'),)


def test_turns_that_nobody_generated_are_text_with_their_calls():
    turn = Turn("assistant", "So: ", tool_calls=(ToolCall("call-1", "add", '{"a": 1}'),))
    assert chat().extend([Turn("user", "x"), turn], [Turn("user", "y")], (), "eos") is None
    text = BYTES.decode(chat().begin([Turn("user", "x"), turn, Turn("user", "y")], ()))
    assert text == 'xSo: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>y'


def test_answers_of_tools_may_take_another_role():
    renderer = chat(ByteTokenizer(ByteTokenizerConfig(roles=("user", "assistant"))), tool_role="user")
    assert renderer.begin([Turn("tool", "4", tool_call_id="call-1")], ()) == [BOS, 260, *b"4", END, 261]


def test_what_it_cannot_render_is_refused():
    with pytest.raises(UsageError, match="image"):
        chat().begin([Turn("user", ("see", Media("image", b"", "image/png")))], ())
    assert chat().begin([Turn("user", ("a", "b"))], ()) == [BOS, USER, *b"ab", END, ASSISTANT]
    with pytest.raises(UsageError, match="no role"):
        chat(ByteTokenizer(ByteTokenizerConfig(roles=("user",))))
    with pytest.raises(UsageError, match="must not be empty"):
        chat(call_open="")

    class Endless(Merging):
        def render(self, messages):
            return [1 for _ in messages], [False for _ in messages]

    with pytest.raises(UsageError, match="never stop"):
        chat(Endless())

    class Holed(Merging):
        def render(self, messages):
            return [1, 2, 3] * len(messages), [True, False, True] * len(messages)

    with pytest.raises(PluginError, match="mask"):
        chat(Holed())


def test_a_tokenizer_with_a_prefix_has_it_once():
    class Prefixed(Merging):
        def render(self, messages):
            ids, mask = super().render(messages)
            return [7, *ids], [False, *mask]

    assert chat(Prefixed()).begin([Turn("user", "x"), Turn("user", "y")], ()).count(7) == 1


def test_no_torch():
    code = "import intarsia_rl.render.chat, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
