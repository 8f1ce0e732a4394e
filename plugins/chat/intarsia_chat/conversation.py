"""Conversations to token ids, by a chat template and a tokenizer of text; and what of them is trained on.

How: the template writes the whole conversation as one text. Special tokens in it are the template's own (what was typed is out of its sight, see `guard`), so its special tokens say where turns
are: an assistant's turn begins behind what the template also ends a prompt with, and ends with the first end of turn. Between special tokens and ids text is encoded as one string, template and
content together, as a reference's tokenizer does. Where a token would lie across the beginning of an assistant's turn, the turn begins a little earlier, where none does; and where there is no
such place (the turn's own first character merges with the header: a line break, nearly always), text is cut there, as it is when the model speaks: the prompt's last token is complete before
the model's first.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from intarsia.contracts import Message, Tokenizer, ToolSpec
from intarsia.errors import UsageError, did_you_mean
from intarsia_data.tokenizer import is_trained

from intarsia_chat.contracts import ChatTemplate
from intarsia_chat.formats.values import encodable, tool_object
from intarsia_chat.guard import Guard, Piece, Special, Text, special_pattern
from intarsia_chat.jinja import CompiledTemplate

ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
REMEMBERED, LONGEST_REMEMBERED = 512, 1 << 14


@dataclasses.dataclass(frozen=True)
class Frame:
    """What a template writes around an assistant's turn: `prompt` at the end of a prompt, of which `header` is what every assistant's turn begins with; `end` is the special token behind it."""

    prompt: str
    header: str
    end: str


@dataclasses.dataclass(frozen=True)
class Region:
    """An assistant's turn in a rendered text: from its first character to the one behind its end. `header_end` is where its header ends, which may be before what else the prompt holds."""

    message: int
    begin: int
    end: int
    header_end: int


@dataclasses.dataclass(frozen=True)
class Written:
    """What a template wrote, cut into pieces (first character, last + 1, what), with the assistant's turns in it."""

    guard: Guard
    text: str
    pieces: Sequence[tuple[int, int, Piece]]
    regions: Sequence[Region]


class Conversation:
    """See the module. Made once for a template and a tokenizer; UsageError where they do not fit. It has no state: threads may share it."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, variables: Mapping[str, Any], characters: int, date: str | None = None
    ):
        self.template, self._tokenizer = template, tokenizer
        self._compiled = CompiledTemplate(template.name, template.text, characters, date)
        self.special_ids = self._special_ids()
        self.pattern = special_pattern(self.special_ids)
        self._variables = dict(variables)
        self._remembered = functools.lru_cache(REMEMBERED)(lambda text: tuple(tokenizer.encode(text)))
        self.frame = self._measure()
        ends = [self.special_ids[self.frame.end], *(self.special_ids[text] for text in template.stops if text in self.special_ids)]
        ends += [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        opened = self.frame.prompt.rfind(template.reasoning[0])
        closed = self.frame.prompt.rfind(template.reasoning[1])
        # What of the model's turn stands in the prompt already.
        self.opening = self.frame.prompt[opened:] if opened > closed else ""

    # ------------------------------------------------------------ what it gives

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[list[int], list[bool]]:
        """See Tokenizer."""
        if not messages and not tools:
            return [], []
        for number, message in enumerate(messages):
            if message.trained and message.role != "assistant":
                raise UsageError(
                    f"message {number + 1} of {len(messages)} is the {message.role}'s and marked as trained on, but a chat template says only where the assistant's turns are."
                )
        written = self._written(messages, tools, False, {})
        ids: list[int] = []
        mask: list[bool] = []
        following = (region for region in written.regions if is_trained(messages[region.message]))
        region = next(following, None)
        for begin, some in self._encoded(written):
            while region is not None and begin >= region.end:
                region = next(following, None)
            ids += some
            mask += [region is not None and begin >= region.begin] * len(some)
        return ids, mask

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Ids up to where the assistant speaks next."""
        return self.with_ids(messages, tools, {})

    def with_ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec], said: Mapping[int, Sequence[int]]) -> list[int]:
        """`prompt`, with assistant's turns by the ids that a model generated: `said` has them by the message's number, whose content is their text.

        Such a turn is its header, the very ids, and the end of turn where they have none. Where the template drops its reasoning, the ids behind that stand there.
        """
        written = self._written(messages, tools, True, said)
        ids: list[int] = []
        whole = {region.begin: region for region in written.regions if region.message in said}
        skipped = -1
        for begin, some in self._encoded(written):
            if (region := whole.get(begin)) is not None:
                keeps = written.guard.keeps(region.message, written.text[begin : region.end])
                ids += self._said(said[region.message], messages[region.message], keeps)
                skipped = region.end
            if begin >= skipped:
                ids += some
        return ids

    def text_of(self, ids: Sequence[int]) -> str:
        """What a generated turn says, without the token that ended it, and with what of it the prompt held."""
        kept = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return self.opening + self._decoded(kept)

    # ------------------------------------------------------------ the template's text

    def _written(self, messages: Sequence[Message], tools: Sequence[ToolSpec], prompt: bool, said: Mapping[int, Sequence[int]]) -> Written:
        guard = Guard(self.pattern)
        values = [self._values(message, number, len(messages), guard, number in said) for number, message in enumerate(messages)]
        text = self._text(values, tools, prompt, guard)
        speakers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        pieces = list(guard.pieces(text))
        regions = [
            region if region.message in said else self._settled(region, text, pieces, guard)
            for region in self._regions(text, speakers, prompt)
        ]
        return Written(guard, text, pieces, regions)

    def _text(self, values: Sequence[Mapping[str, Any]], tools: Sequence[ToolSpec], prompt: bool, guard: Guard) -> str:
        names = {number: text for text, number in self.special_ids.items()}
        variables: dict[str, Any] = {}
        for name in ("bos", "eos", "pad"):
            number = getattr(self._tokenizer, f"{name}_id")
            if number is not None:
                variables[f"{name}_token"] = names[number] if number in names else guard.token(number)
        offered = guard.values([tool_object(tool) for tool in tools]) or None
        return self._compiled.render(values, **variables, **self._variables, tools=offered, add_generation_prompt=prompt)

    def _values(self, message: Message, number: int, count: int, guard: Guard, said: bool) -> dict[str, Any]:
        """A message as templates know it. A generated one shows the template only whether it reasons and whether it says something."""
        where = f"message {number + 1} of {count}"
        if not ROLE.fullmatch(message.role):
            raise UsageError(f"{where}: the role {message.role!r} is none; a role is a word, such as user or assistant.")
        opens, closes = self.template.reasoning
        try:
            if not said:
                content = guard.content(message.content, (opens, closes) if message.role == "assistant" else ())
            else:
                reasons, rest = self._split(str(message.content))
                content = (f"{opens}\n{guard.reasoning(number)}\n{closes}\n\n" if reasons else "") + (guard.ids() if rest else "")
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
        values: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            values["tool_calls"] = [
                {
                    "type": "function",
                    "id": guard.typed(call.id),
                    "function": {"name": guard.typed(call.name), "arguments": guard.values(_arguments(call.arguments, where))},
                }
                for call in message.tool_calls
            ]
        return values

    def _regions(self, text: str, speakers: Sequence[int], prompt: bool) -> list[Region]:
        frame, position, found = self.frame, 0, []
        stop = len(text) - len(frame.prompt) if prompt else len(text)
        if prompt and not text.endswith(frame.prompt):
            raise UsageError(
                f"Chat template {self.template.name}: what it writes does not end with its own beginning of a turn, {frame.prompt!r}."
            )
        while (at := text.find(frame.header, position, stop)) >= 0:
            header_end = at + len(frame.header)
            begin = (
                at + len(frame.prompt)
                if frame.prompt and text.startswith(frame.prompt, at) and at + len(frame.prompt) <= stop
                else header_end
            )
            end = text.find(frame.end, begin, stop)
            position = stop if end < 0 else end + len(frame.end)
            found.append((begin, position, header_end))
        if not frame.prompt and found and found[-1][0] == len(text):  # a user's turn that nobody has answered
            found.pop()
        headers = text.count(frame.header, 0, stop) - (not frame.prompt and text.endswith(frame.header))
        if not len(found) == len(speakers) == headers:
            raise UsageError(
                f"Chat template {self.template.name} writes {headers} turns of the assistant for a conversation with {len(speakers)}, so it cannot be told what is to be trained on. "
                "Join messages of the assistant that follow one another, or use another template."
            )
        return [Region(number, *place) for number, place in zip(speakers, found, strict=True)]

    # ------------------------------------------------------------ text to ids

    def _settled(self, region: Region, text: str, pieces: Sequence[tuple[int, int, Piece]], guard: Guard) -> Region:
        """The region with the latest beginning that no token of the text lies across; as it is, where there is none."""
        for begin in dict.fromkeys((region.begin, region.header_end)):
            first, last, piece = pieces[bisect.bisect_right(pieces, begin, key=lambda item: item[0]) - 1]
            if begin in (first, last) or not isinstance(piece, Text):
                return dataclasses.replace(region, begin=begin)
            cut = [*self.encode(guard.back(text[first:begin])), *self.encode(guard.back(text[begin:last]))]
            if cut == list(self.encode(guard.back(text[first:last]))):
                return dataclasses.replace(region, begin=begin)
        return region

    def _encoded(self, written: Written) -> Iterator[tuple[int, Sequence[int]]]:
        """(place of the first character, ids) of pieces in order; at the beginning of every region a piece begins."""
        guard, size = written.guard, self._tokenizer.vocab_size
        borders = [region.begin for region in written.regions]
        for begin, end, piece in written.pieces:
            if isinstance(piece, Special):
                yield begin, (self.special_ids[str(piece)],)
            elif isinstance(piece, Text):
                inside = borders[bisect.bisect_right(borders, begin) : bisect.bisect_left(borders, end)]
                for first, last in itertools.pairwise([begin, *inside, end]):
                    yield first, self.encode(guard.back(written.text[first:last]))
            else:
                if bad := [number for number in piece if not 0 <= number < size]:
                    raise UsageError(f"token id {bad[0]} is out of range: the tokenizer has the ids 0 to {size - 1}")
                yield begin, piece

    def encode(self, text: str) -> Sequence[int]:
        """The tokenizer's, remembered: a conversation that grows is encoded many times."""
        return self._remembered(text) if len(text) <= LONGEST_REMEMBERED else self._tokenizer.encode(text)

    # ------------------------------------------------------------ generated turns

    def reasoning_end(self, text: str) -> int:
        """The place behind the reasoning in a generated text, 0 where it has none. Reasoning that never ends goes to the end."""
        opens, closes = self.template.reasoning
        begin = text.find(opens)
        if begin < 0:
            return 0
        end = text.find(closes, begin)
        return len(text) if end < 0 else end + len(closes)

    def _split(self, text: str) -> tuple[bool, str]:
        """Whether a generated text reasons, and what it says behind that."""
        end = self.reasoning_end(text)
        return (True, text[end:].lstrip()) if end else (False, text)

    def _said(self, ids: Sequence[int], message: Message, keeps: bool) -> list[int]:
        """A generated turn: its ids, or those behind its reasoning, and its end."""
        kept = list(ids) if keeps else self._behind_reasoning(ids, str(message.content))
        end = self.special_ids[self.frame.end]
        return kept if kept[-1:] == [end] else [*kept, end]

    def _behind_reasoning(self, ids: Sequence[int], text: str) -> list[int]:
        """The ids of what follows reasoning, where a token begins there; else that text's, encoded: it is context, and never trained on."""
        stopped = list(ids[-1:]) if ids and ids[-1] in self.stop_ids else []
        kept = list(ids[: len(ids) - len(stopped)])
        rest = self._split(text)[1]
        low, high = 0, len(kept)
        while low < high:  # The text of a tail is no longer than that of a longer tail.
            middle = (low + high) // 2
            low, high = (low, middle) if len(self._decoded(kept[middle:])) <= len(rest) else (middle + 1, high)
        return [*(kept[low:] if self._decoded(kept[low:]) == rest else self._tokenizer.encode(rest)), *stopped]

    def _decoded(self, ids: Sequence[int]) -> str:
        """Text of ids, in which the markers of reasoning and of calls are text also where they are special tokens, which a tokenizer leaves out."""
        made: list[str] = []
        begin = 0
        for place, number in enumerate(ids):
            if number in self._shown:
                made += [self._tokenizer.decode(ids[begin:place]), self._shown[number]]
                begin = place + 1
        return "".join([*made, self._tokenizer.decode(ids[begin:])])

    @functools.cached_property
    def _shown(self) -> dict[int, str]:
        shown = (*self.template.reasoning, *MARKERS)
        return {number: text for text, number in self.special_ids.items() if text in shown}

    # ------------------------------------------------------------ the template and the tokenizer

    def _special_ids(self) -> dict[str, int]:
        """Special tokens by their text. UsageError where the template's are missing."""
        name, tokenizer = self.template.name, self._tokenizer
        named: Mapping[str, int] = getattr(tokenizer, "special_ids", {})
        asked = (*self.template.special, *self.template.stops, *self.template.reasoning, *MARKERS)
        known = getattr(tokenizer, "special_id", lambda _: None)  # a tokenizer may be older than that
        found = {text: number for text in asked if (number := known(text)) is not None} | dict(named)
        missing = [text for text in self.template.special if text not in found]
        if missing:
            texts = ", ".join(map(repr, missing))
            raise UsageError(
                f"Chat template {name} needs the special token{'s' * (len(missing) > 1)} {texts}, which {type(tokenizer).__name__} does not have. {did_you_mean(missing[0], found)} Take the "
                "tokenizer that belongs to the model, or a template whose tokens it has; for the byte tokenizer, name them in data.tokenizer.tokenizer.specials."
            )
        return found

    def _measure(self) -> Frame:
        """How the template frames an assistant's turn, from how it writes two short conversations."""
        name, guard = self.template.name, Guard(self.pattern)
        said, asked = guard.ids(), [{"role": "user", "content": guard.ids()}]
        history = [*asked, {"role": "assistant", "content": said}, *asked, {"role": "assistant", "content": guard.ids()}]
        whole = self._text(history, (), False, guard)
        alone, prompted = self._text(asked, (), False, guard), self._text(asked, (), True, guard)
        if whole.count(said) != 1:
            raise UsageError(
                f"Chat template {name} writes an assistant's content {whole.count(said)} times; what is trained on has to stand there once."
            )
        before, behind = whole.split(said)
        if not prompted.startswith(alone):
            raise UsageError(f"Chat template {name} writes something else before the assistant's turn where add_generation_prompt is set.")
        prompt = prompted[len(alone) :]
        if prompt:
            header = next((prompt[:length] for length in range(len(prompt), 0, -1) if before.endswith(prompt[:length])), "")
        else:  # The assistant's turn begins with what ends the turn before it.
            last = max((found.start() for found in self.pattern.finditer(before)), default=len(before))
            header = before[last:]
        end = self.pattern.search(behind)
        if self.pattern.search(header) is None or end is None:
            raise UsageError(
                f"Chat template {name} marks {'the beginning' if end else 'the end'} of an assistant's turn by no special token of the tokenizer, so a user could type it. Use a template whose "
                "special tokens the tokenizer has."
            )
        return Frame(prompt, header, end[0])


MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")


def _arguments(text: str, where: str) -> dict[str, Any]:
    """A call's arguments. UsageError where they are no JSON object."""
    try:
        value = json.loads(text) if text.strip() else {}
        encodable(value)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: the arguments of its call are no JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UsageError(f"{where}: the arguments of its call are {type(value).__name__} and no JSON object.")
    return value
