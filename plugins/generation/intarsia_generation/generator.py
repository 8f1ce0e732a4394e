"""Prompts to completions. Shape suffixes: B sequences, S tokens, D model width, V vocabulary."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from intarsia import ops
from intarsia.contracts import Document, Message, Tokenizer, ToolSpec
from intarsia.errors import NumericsError, UsageError
from torch import Tensor, nn

from intarsia_generation.cache import CacheContext
from intarsia_generation.prompts import Input, Prompt, Read, check_no_placeholders, check_sight, look, media_of, prefill
from intarsia_generation.sampling import choose, generator_for
from intarsia_generation.settings import SamplingConfig
from intarsia_generation.text import IncrementalText

OnText = Callable[[int, str], None]
"""Called with a completion's number and a further piece of its text."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """One generated text. Stability: provisional.

    `tokens` are all that were generated, the one that ended it included; `log_probs` each one's natural log-probability under the model (temperature 1,
    nothing left out). `finish` says why it ended: `length` (max_tokens), `eos` (an end token) or `stop` (the text `stopped_by`).
    """

    prompt: str | None
    prompt_tokens: tuple[int, ...]
    sample: int
    text: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: str
    stopped_by: str | None = None


def begin_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What a text begins with."""
    return () if tokenizer.bos_id is None else (tokenizer.bos_id,)


class _Sequence:
    """A completion in the making."""

    def __init__(self, number: int, prompt: Input, sample: int, ends: frozenset[int], config: SamplingConfig, tokenizer: Tokenizer):
        self.number, self.prompt, self.sample, self.ends = number, prompt, sample, ends
        self.random = generator_for(config.seed, prompt.tokens, sample, prompt.digest)
        self.text = IncrementalText(tokenizer, config.stop)
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.finish = ""

    def take(self, token: int, log_prob: float, config: SamplingConfig) -> str:
        """Add a token; returns text to show. `finish` is set when it was the last."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token in self.ends:
            self.finish = "eos"
            return self.text.finish()
        shown = self.text.add(token)
        if self.text.stopped_by is None and len(self.tokens) == config.max_tokens:
            self.finish = "length"
            shown += self.text.finish()
        if self.text.stopped_by is not None:
            self.finish = "stop"
        return shown


class Generator:
    """A model that is ready to write. Made by `load`. Stability: provisional.

    `model` is an `intarsia.contracts.Model` on `device`; `choices` are the kernels that run it. `location` says where the weights came from, `step` is
    the checkpoint's (None: not an Intarsia checkpoint), `run` the run directory that was named. `processor` makes, where it is first needed, the processor of
    images and video (`intarsia_multimodal.contracts.Processor`; None: prompts are text).
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        max_positions: int,
        device: torch.device,
        *,
        choices: Mapping[str, ops.Choice] | None = None,
        stop_ids: Sequence[int] = (),
        location: str = "",
        step: int | None = None,
        run: Path | None = None,
        chunk: int = 512,
        batch: int = 32,
        processor: Callable[[], Any] | None = None,
    ):
        self.model: Any = model
        self.tokenizer, self.max_positions, self.device = tokenizer, max_positions, device
        self.choices = dict(choices or {})
        self.location, self.step, self.run = location, step, run
        self.chunk, self.batch = chunk, batch
        self._make_processor = processor
        self.ends = frozenset({*stop_ids} | ({tokenizer.eos_id} if tokenizer.eos_id is not None else set()))

    @functools.cached_property
    def processor(self) -> Any:
        """What turns images and video into tokens and patches. UsageError where nothing says which it is."""
        if self._make_processor is None:
            raise UsageError(
                f"Nothing at {self.location or 'the model'} says how images and video become tokens: it is no run whose loader has a processor, and no folder whose files describe one. Name one by --processor NAME (load's "
                "`processor`); patches is the one of the Qwen families."
            )
        return self._make_processor()

    @functools.cached_property
    def decoder(self) -> Any:
        """What loads images and video, equal ones once. UsageError as `processor`."""
        from intarsia_multimodal.decoding import Decoder

        return Decoder(self.processor)

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """A prompt's tokens. A text begins with the begin-of-text token where the tokenizer has one, as documents do in training."""
        if not isinstance(prompt, str):
            ids = tuple(prompt)
            if bad := [number for number in ids if not 0 <= number < self.model.config.vocab_size]:
                raise UsageError(f"Token {bad[0]} is not in the model's vocabulary of {self.model.config.vocab_size}.")
        else:
            ids = (*begin_of(self.tokenizer), *self.tokenizer.encode(prompt))
        if not ids:
            raise UsageError("The prompt is empty, and the tokenizer has no token that begins a text: give a prompt of at least one token.")
        return ids

    def encode_chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens of a conversation up to where the assistant begins to speak, and the tokens that end its turn: any of them where the tokenizer knows its own prompts (`prompt`, `stop_ids`).
        Its media are ids already."""
        tokenizer: Any = self.tokenizer
        given = (tools,) if tools else ()
        if hasattr(tokenizer, "prompt"):
            return tuple(tokenizer.prompt(messages, *given)), tuple(tokenizer.stop_ids)
        ids, trained = tokenizer.render([*messages, Message("assistant", "")], *given)
        end = len(ids)
        while end and trained[end - 1]:
            end -= 1
        return (*begin_of(tokenizer), *ids[:end]), tuple(ids[end : end + 1])

    def read(self, prompt: Prompt, number: int = 1) -> Read:
        """A prompt of any kind as tokens; of media no more is read than headers. `number` names it in errors.

        Errors: UsageError for media where the model or the run does not see, for placeholders without media, and for a document that has ended (tokens with a mask); MediaError for media that
        cannot be used.
        """
        tools: tuple[ToolSpec, ...] = ()
        if isinstance(prompt, Document):
            text = prompt.text if prompt.text is not None else prompt.tokens
            tools, prompt = prompt.tools, next((each for each in (text, prompt.messages, prompt.parts) if each is not None), "")
        if isinstance(prompt, str):
            return Read(self.encode(prompt), text=prompt)
        shown = media_of(prompt)
        expand: Callable[[Any], Any] = tuple
        if shown:
            check_sight(self.model, self.location)
            expand = self.processor.as_ids
        ends: tuple[int, ...] = ()
        if prompt and isinstance(prompt[0], Message):
            turns: Any = prompt
            written = [turn if isinstance(turn.content, str) else dataclasses.replace(turn, content=expand(turn.content)) for turn in turns]
            ids, ends = self.encode_chat(written, tools)
        elif shown or any(isinstance(part, str) for part in prompt):
            parts: Any = expand(prompt)
            pieces = [self.tokenizer.encode(part) if isinstance(part, str) else [part] for part in parts]
            ids = self.encode([*begin_of(self.tokenizer), *(token for piece in pieces for token in piece)])
        else:
            ids = self.encode(prompt)  # type: ignore[arg-type]
        if not shown:
            check_no_placeholders(self.model, ids, number)
        return Read(ids, self.processor.locate(ids, shown) if shown else None, ends=ends)

    def generate(
        self,
        prompts: Sequence[Prompt],
        config: SamplingConfig | None = None,
        on_text: OnText | None = None,
        ends: Sequence[int] = (),
    ) -> list[Completion]:
        """Completions of all samples of the first prompt, then of the second, and so on. A prompt is a text; tokens that are taken as they are; text and media in turns; a conversation
        that the assistant goes on with; or a `Document` of one of these kinds.

        `on_text` is called as texts grow. `ends` are further tokens that end a text; those that end an assistant's turn always do.
        Raises UsageError for an empty prompt, where prompt and max_tokens exceed the model's positions, and for media that the model cannot see; MediaError (a UsageError) for media that
        cannot be used; NumericsError for logits that are not finite.
        """
        config = config or SamplingConfig()
        read = [self.read(prompt, number + 1) for number, prompt in enumerate(prompts)]
        for number, each in enumerate(read):
            self._check_length(number, len(each.tokens), config)
        every = self.ends | set(ends)
        finals = [frozenset() if config.ignore_eos else every | set(each.ends) for each in read]
        jobs = [(number, sample) for number in range(len(read)) for sample in range(config.samples)]
        sequences: list[_Sequence] = []
        with torch.inference_mode(), self._kernels():
            for first in range(0, len(jobs), self.batch):
                together = jobs[first : first + self.batch]
                # Pixels are loaded for one batch at a time.
                inputs = {number: self._input(read[number]) for number in dict.fromkeys(number for number, _ in together)}
                live = [
                    _Sequence(first + place, inputs[number], sample, finals[number], config, self.tokenizer)
                    for place, (number, sample) in enumerate(together)
                ]
                sequences += live
                self._run(live, config, on_text)
        return [
            Completion(
                read[number].text,
                each.prompt.tokens,
                sample,
                each.text.text,
                tuple(each.tokens),
                tuple(each.log_probs),
                each.finish,
                each.text.stopped_by,
            )
            for (number, sample), each in zip(jobs, sequences, strict=True)
        ]

    def _check_length(self, number: int, length: int, config: SamplingConfig) -> None:
        if length + config.max_tokens > self.max_positions:
            left = self.max_positions - length
            advice = (
                f"Shorten it, or set max_tokens to at most {left}." if left > 0 else "Shorten it: a prompt and what follows share them."
            )
            raise UsageError(
                f"Prompt {number + 1} has {length} tokens; with max_tokens {config.max_tokens} that is {length + config.max_tokens}, but the "
                f"model has {self.max_positions} positions. {advice}"
            )

    def _input(self, read: Read) -> Input:
        """A prompt with its pixels."""
        shown = None if read.prepared is None else look(read.prepared, self.decoder)
        return Input(read.tokens, "" if shown is None else shown.digest, shown)

    @contextlib.contextmanager
    def _kernels(self) -> Iterator[None]:
        with ops.installed(self.choices):
            yield

    def _run(self, live: list[_Sequence], config: SamplingConfig, on_text: OnText | None) -> None:
        """Generate some sequences together. A prompt that several of them share is read once."""
        prompts = list(dict.fromkeys(each.prompt for each in live))
        context = CacheContext(self.model, len(prompts), self.device, self.chunk)
        logits_BV = prefill(self.model, context, prompts)
        rows = [prompts.index(each.prompt) for each in live]
        context.select(rows)
        logits_BV = logits_BV[rows]
        while True:
            if not bool(logits_BV.isfinite().all()):
                raise NumericsError(f"The model of {self.location} gives logits that are not finite: its weights are not sound.")
            chosen_B, log_probs_B = choose(logits_BV, config, [each.random for each in live])
            tokens = chosen_B.tolist()
            for each, token, log_prob in zip(live, tokens, log_probs_B.tolist(), strict=True):
                shown = each.take(token, log_prob, config)
                if on_text is not None and shown:
                    on_text(each.number, shown)
            going = [row for row, each in enumerate(live) if not each.finish]
            if not going:
                return
            context.select(going)
            live = [live[row] for row in going]
            context.begin([1] * len(live))
            hidden_BSD = self.model(chosen_B[going][:, None], context)
            logits_BV = self.model.project(hidden_BSD)[:, -1]

    def prefill(self, context: CacheContext, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts of tokens into a fresh context, `chunk` tokens at a time; returns the logits behind each one's last token, [B, V]."""
        return prefill(self.model, context, [Input(tuple(prompt)) for prompt in prompts])
