"""The renderer `chat`: turns as any tokenizer's `render` marks them, around generated tokens that are never touched.

A turn is (start, content, end). What a tokenizer puts before the content and behind it is learned from how it renders an empty turn: its mask is False on the start
and True on the end. A generated turn stands in a context as start, its very ids, and what is missing of the end. Each other turn is rendered alone, so that a
merge across a border between turns cannot change what was there before.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from intarsia.contracts import Media, Message, Parts, Tokenizer, ToolCall, ToolSpec, Turn
from intarsia.errors import PluginError, UsageError
from intarsia_data.tokenizer import text_of

from intarsia_rl.contracts import Finish
from intarsia_rl.render.config import ChatConfig


class ChatRenderer:
    """A Renderer (`intarsia_rl.contracts`) over any tokenizer whose `render` knows roles. It has no state: one serves all episodes.

    A turn ends with the first token of the tokenizer's end of turn, or with its end of text.
    """

    def __init__(self, config: ChatConfig, tokenizer: Tokenizer):
        markers = (config.call_open, config.call_close, config.reasoning_open, config.reasoning_close)
        if "" in markers:
            raise UsageError("chat renderer: call_open, call_close, reasoning_open and reasoning_close must not be empty.")
        self._config, self._tokenizer = config, tokenizer
        self._prefix = tokenizer.render([])[0]
        self._start, self._end = self._frame("assistant")
        stops = [*self._end[:1], *([] if tokenizer.eos_id is None else [tokenizer.eos_id])]
        if not stops:
            raise UsageError(
                "chat renderer: the tokenizer has neither an end of turn nor an end of text, so a policy could never stop. Give it one "
                "(data.tokenizer.turn_end=... for a tokenizer.json)."
            )
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))

    # ------------------------------------------------------------ the contract

    def begin(self, turns: Sequence[Turn], tools: Sequence[ToolSpec]) -> list[int]:
        """All tokens of a history, up to where the policy speaks."""
        ids = list(self._prefix)
        bos = self._tokenizer.bos_id
        if bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        last_user = _last_user(turns)
        for number, turn in enumerate(self._with_tools(turns, tools)):
            # A system turn that only holds tools moves the others by one; it can only be the first.
            dropped = not self._config.keep_reasoning and number < last_user + self._adds_turn(turns, tools)
            ids += self._turn(turn, dropped)
        return ids + self._start

    def extend(self, turns: Sequence[Turn], new: Sequence[Turn], tools: Sequence[ToolSpec], finish: Finish) -> list[int] | None:
        """Tokens between the last generated token and where the policy speaks again; None where reasoning has to be dropped, or where no generated turn is the last.

        `tools` are those that the context was begun with: where they have changed, begin a new one.
        """
        if not turns or turns[-1].role != "assistant" or turns[-1].tokens is None:
            return None
        if not self._config.keep_reasoning and _last_user(new) >= 0:
            open_turns = [turn for turn in turns[_last_user(turns) + 1 :] if turn.role == "assistant"]
            if any(self._config.reasoning_open in text_of(self._content(turn)) for turn in open_turns):
                return None
        ids = self._rest_of_end(turns[-1].tokens)
        for turn in new:
            ids += self._turn(turn, False)
        return ids + self._start

    def parse(self, tokens: Sequence[int], finish: Finish) -> Turn:
        """The assistant's turn. Its content is the text without the calls, and with the reasoning; what is no valid call stays in it."""
        kept = tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens
        content, calls = self._calls(self._tokenizer.decode(list(kept)))
        return Turn("assistant", content, tokens=tuple(tokens), tool_calls=calls)

    # ------------------------------------------------------------ turns to tokens

    def _frame(self, role: str) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind the content of a turn."""
        ids, mask = self._tokenizer.render([Message(role, "", trained=True)])
        ids, mask = ids[len(self._prefix) :], mask[len(self._prefix) :]
        start = mask.index(True) if True in mask else len(mask)
        if len(mask) != len(ids) or not all(mask[start:]):
            raise PluginError(
                f"chat renderer: {type(self._tokenizer).__name__}.render gives the mask {mask} for an empty turn of role {role!r}; it must be False on what "
                "stands before the content and True on the rest."
            )
        return list(ids[:start]), list(ids[start:])

    def _turn(self, turn: Turn, drop_reasoning: bool) -> list[int]:
        """A whole turn."""
        if turn.role == "assistant" and turn.tokens is not None:
            tokens = self._without_reasoning(turn.tokens) if drop_reasoning else list(turn.tokens)
            return [*self._start, *tokens, *self._rest_of_end(turn.tokens)]
        role = self._config.tool_role if turn.role == "tool" else turn.role
        content = self._content(turn)
        if drop_reasoning and turn.role == "assistant" and isinstance(content, str):
            content = self._strip(content)
        return list(self._tokenizer.render([Message(role, content)])[0][len(self._prefix) :])

    def _rest_of_end(self, tokens: Sequence[int]) -> list[int]:
        """The end of turn behind generated tokens: without its first token where that was generated."""
        return self._end[1:] if tokens[-1:] == tuple(self._end[:1]) else list(self._end)

    def _with_tools(self, turns: Sequence[Turn], tools: Sequence[ToolSpec]) -> Sequence[Turn]:
        """The turns, with what tools there are in the system turn."""
        if not tools:
            return turns
        text = self._describe(tools)
        if self._adds_turn(turns, tools):
            return [Turn("system", text), *turns]
        return [dataclasses.replace(turns[0], content=_behind(turns[0].content, f"\n\n{text}")), *turns[1:]]

    @staticmethod
    def _adds_turn(turns: Sequence[Turn], tools: Sequence[ToolSpec]) -> bool:
        return bool(tools) and not (turns and turns[0].role == "system")

    def _describe(self, tools: Sequence[ToolSpec]) -> str:
        lines = [_json({"name": tool.name, "description": tool.description, "parameters": tool.parameters}) for tool in tools]
        form = f'{self._config.call_open}{{"name": NAME, "arguments": {{...}}}}{self._config.call_close}'
        return "\n".join(["Tools:", *lines, f"To call one, write {form}"])

    def _content(self, turn: Turn) -> str | Parts:
        """Content and calls: as text, or with the ids of media between texts."""
        calls = [
            f'{self._config.call_open}{{"name": {_json(call.name)}, "arguments": {call.arguments}}}{self._config.call_close}'
            for call in turn.tool_calls
        ]
        return _behind(turn.content, "".join(calls))

    # ------------------------------------------------------------ reasoning

    def _strip(self, text: str) -> str:
        """The text without its reasoning; reasoning that never ends goes to the end."""
        while (begin := text.find(self._config.reasoning_open)) >= 0:
            end = text.find(self._config.reasoning_close, begin)
            rest = "" if end < 0 else text[end + len(self._config.reasoning_close) :].lstrip()
            text = text[:begin] + rest
        return text

    def _without_reasoning(self, tokens: tuple[int, ...]) -> list[int]:
        """Generated ids without their reasoning: all ids behind it where a token begins there, else the rest's text as new ids (it is context, never trained on)."""
        text = self._tokenizer.decode(list(tokens))
        if self._config.reasoning_open not in text:
            return list(tokens)
        stopped = tokens[-1:] if tokens[-1] in self.stop_ids else ()
        rest = self._strip(self._tokenizer.decode(list(tokens[: len(tokens) - len(stopped)])))
        for begin in range(len(tokens) - len(stopped), -1, -1):
            tail = self._tokenizer.decode(list(tokens[begin : len(tokens) - len(stopped)]))
            if tail == rest:
                return list(tokens[begin:])
            if len(tail) > len(rest):
                break
        return [*self._tokenizer.encode(rest), *stopped]

    # ------------------------------------------------------------ tokens to calls

    def _calls(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """The text without its valid calls, and these."""
        config, position = self._config, 0
        kept: list[str] = []
        calls: list[ToolCall] = []
        while position < len(text):
            thought, begin = text.find(config.reasoning_open, position), text.find(config.call_open, position)
            if begin < 0:
                break
            if 0 <= thought < begin:
                end = text.find(config.reasoning_close, thought)
                end = len(text) if end < 0 else end + len(config.reasoning_close)
                kept.append(text[position:end])
                position = end
                continue
            kept.append(text[position:begin])
            position = begin + len(config.call_open)
            found = self._call(text, position)
            if found is None:
                kept.append(config.call_open)
            else:
                (name, arguments), position = found
                calls.append(ToolCall(f"call-{len(calls) + 1}", name, arguments))
        return "".join(kept) + text[position:], tuple(calls)

    def _call(self, text: str, begin: int) -> tuple[tuple[str, str], int] | None:
        """Name and arguments of the call whose JSON begins here, and where it ends; None where there is none."""
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        try:
            value, end = _DECODER.raw_decode(text, begin)
            arguments = value.get("arguments", {}) if isinstance(value, dict) else None
            arguments = _json(arguments) if isinstance(arguments, dict) else arguments
        except (ValueError, RecursionError):
            return None
        end += len(text[end:]) - len(text[end:].lstrip())
        if not text.startswith(self._config.call_close, end) or not isinstance(arguments, str) or not isinstance(value.get("name"), str):
            return None
        return (value["name"], arguments), end + len(self._config.call_close)


def build(config: ChatConfig, tokenizer: Tokenizer) -> ChatRenderer:
    """The renderer."""
    return ChatRenderer(config, tokenizer)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _last_user(turns: Sequence[Turn]) -> int:
    """The index of the last turn of the user, -1 where there is none."""
    return max((number for number, turn in enumerate(turns) if turn.role == "user"), default=-1)


def _behind(content: str | Parts, text: str) -> str | Parts:
    """Content with a text behind it; where it is text alone, as one. UsageError where it holds an image that is no ids."""
    if isinstance(content, str):
        return content + text
    if any(isinstance(part, Media) for part in content):
        raise UsageError("chat renderer: a turn holds an image, and this renderer takes ids. Set data.loader.processor, which makes them.")
    if any(isinstance(part, int) for part in content):
        return (*content, text) if text else content
    return text_of(content) + text
