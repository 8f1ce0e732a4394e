"""Prompts to completions. Shape suffixes: B sequences, S tokens, D model width, V vocabulary."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from intarsia import ops
from intarsia.contracts import Message, Tokenizer
from intarsia.errors import NumericsError, UsageError
from torch import Tensor, nn

from intarsia_generation.cache import CacheContext
from intarsia_generation.sampling import choose, generator_for
from intarsia_generation.settings import SamplingConfig
from intarsia_generation.text import IncrementalText

Prompt = str | Sequence[int]
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


class _Sequence:
    """A completion in the making."""

    def __init__(self, number: int, prompt: tuple[int, ...], sample: int, config: SamplingConfig, tokenizer: Tokenizer):
        self.number, self.prompt, self.sample = number, prompt, sample
        self.random = generator_for(config.seed, prompt, sample)
        self.text = IncrementalText(tokenizer, config.stop)
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.finish = ""

    def take(self, token: int, log_prob: float, config: SamplingConfig, ends: frozenset[int]) -> str:
        """Add a token; returns text to show. `finish` is set when it was the last."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token in ends:
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
    the checkpoint's (None: not an Intarsia checkpoint), `run` the run directory that was named.
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
    ):
        self.model: Any = model
        self.tokenizer, self.max_positions, self.device = tokenizer, max_positions, device
        self.choices = dict(choices or {})
        self.location, self.step, self.run = location, step, run
        self.chunk, self.batch = chunk, batch
        self.ends = frozenset({*stop_ids} | ({tokenizer.eos_id} if tokenizer.eos_id is not None else set()))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """A prompt's tokens. A text begins with the begin-of-text token where the tokenizer has one, as documents do in training."""
        if not isinstance(prompt, str):
            ids = tuple(prompt)
            if bad := [number for number in ids if not 0 <= number < self.model.config.vocab_size]:
                raise UsageError(f"Token {bad[0]} is not in the model's vocabulary of {self.model.config.vocab_size}.")
        else:
            bos = self.tokenizer.bos_id
            ids = (*(() if bos is None else (bos,)), *self.tokenizer.encode(prompt))
        if not ids:
            raise UsageError("The prompt is empty, and the tokenizer has no token that begins a text: give a prompt of at least one token.")
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens of a conversation up to where the assistant begins to speak, and the tokens that end its turn: any of them where the tokenizer knows its own prompts (`prompt`, `stop_ids`)."""
        tokenizer: Any = self.tokenizer
        if hasattr(tokenizer, "prompt"):
            return tuple(tokenizer.prompt(messages)), tuple(tokenizer.stop_ids)
        ids, trained = tokenizer.render([*messages, Message("assistant", "")])
        end = len(ids)
        while end and trained[end - 1]:
            end -= 1
        bos = tokenizer.bos_id
        return (*(() if bos is None else (bos,)), *ids[:end]), tuple(ids[end : end + 1])

    def generate(
        self,
        prompts: Sequence[Prompt],
        config: SamplingConfig | None = None,
        on_text: OnText | None = None,
        ends: Sequence[int] = (),
    ) -> list[Completion]:
        """Completions of all samples of the first prompt, then of the second, and so on. A prompt is a text, or tokens that are taken as they are.

        `on_text` is called as texts grow. `ends` are further tokens that end a text.
        Raises UsageError for an empty prompt and where prompt and max_tokens exceed the model's positions; NumericsError for logits that are not finite.
        """
        config = config or SamplingConfig()
        encoded = [self.encode(prompt) for prompt in prompts]
        for number, ids in enumerate(encoded):
            if len(ids) + config.max_tokens > self.max_positions:
                left = self.max_positions - len(ids)
                advice = (
                    f"Shorten it, or set max_tokens to at most {left}." if left > 0 else "Shorten it: a prompt and what follows share them."
                )
                raise UsageError(
                    f"Prompt {number + 1} has {len(ids)} tokens; with max_tokens {config.max_tokens} that is {len(ids) + config.max_tokens}, but the "
                    f"model has {self.max_positions} positions. {advice}"
                )
        every = self.ends | set(ends)
        final = frozenset() if config.ignore_eos else every
        jobs = [(ids, sample) for ids in encoded for sample in range(config.samples)]
        sequences = [_Sequence(number, ids, sample, config, self.tokenizer) for number, (ids, sample) in enumerate(jobs)]
        with torch.inference_mode(), self._kernels():
            for first in range(0, len(sequences), self.batch):
                self._run(sequences[first : first + self.batch], config, final, on_text)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts for _ in range(config.samples)]
        return [
            Completion(
                text, each.prompt, each.sample, each.text.text, tuple(each.tokens), tuple(each.log_probs), each.finish, each.text.stopped_by
            )
            for text, each in zip(texts, sequences, strict=True)
        ]

    @contextlib.contextmanager
    def _kernels(self) -> Iterator[None]:
        with ops.installed(self.choices):
            yield

    def _run(self, live: list[_Sequence], config: SamplingConfig, ends: frozenset[int], on_text: OnText | None) -> None:
        """Generate some sequences together. A prompt that several of them share is read once."""
        prompts = list(dict.fromkeys(each.prompt for each in live))
        context = CacheContext(self.model, len(prompts), self.device, self.chunk)
        logits_BV = self.prefill(context, prompts)
        rows = [prompts.index(each.prompt) for each in live]
        context.select(rows)
        logits_BV = logits_BV[rows]
        while True:
            if not bool(logits_BV.isfinite().all()):
                raise NumericsError(f"The model of {self.location} gives logits that are not finite: its weights are not sound.")
            chosen_B, log_probs_B = choose(logits_BV, config, [each.random for each in live])
            tokens = chosen_B.tolist()
            for each, token, log_prob in zip(live, tokens, log_probs_B.tolist(), strict=True):
                shown = each.take(token, log_prob, config, ends)
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
        """Read prompts into a fresh context, `chunk` tokens at a time; returns the logits behind each one's last token, [B, V]."""
        last: list[Tensor | None] = [None] * len(prompts)
        for first in range(0, max(map(len, prompts)), self.chunk):
            parts = [prompt[first : first + self.chunk] for prompt in prompts]
            counts = [len(part) for part in parts]
            width = max(counts)
            tokens_BS = torch.tensor([[*part, *[0] * (width - len(part))] for part in parts], dtype=torch.int64, device=self.device)
            context.begin(counts)
            hidden_BSD = self.model(tokens_BS, context)
            for row, prompt in enumerate(prompts):
                if first < len(prompt) <= first + self.chunk:
                    last[row] = hidden_BSD[row, len(prompt) - first - 1]
        rows_BD = torch.stack([hidden for hidden in last if hidden is not None])
        return self.model.project(rows_BD[:, None])[:, -1]
