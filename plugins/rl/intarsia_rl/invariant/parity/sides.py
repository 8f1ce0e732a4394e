"""The two sides: the trainer's pass over rows of documents, and the embedded generator's engine. B rows, S tokens, N tokens in a line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy
import torch
from intarsia import ops
from intarsia.contracts import IGNORE
from intarsia.device import on_device
from intarsia.errors import UsageError
from intarsia_data.batches import Row, stack
from intarsia_eager.context import TrainContext, windows_of
from intarsia_eager.following import with_following
from torch import nn

from intarsia_rl.algorithms.operators import token_log_probs
from intarsia_rl.contracts import Generated, Request, Sampling, WeightVersion
from intarsia_rl.invariant.parity.record import Recorder, Token

Sequences = Mapping[str, Sequence[int]]
"""Token ids by the sequence's name."""
LogProbs = dict[Token, float]
"""The log-probability of the token behind each position."""


class Trainer:
    """The model as a trainer calls it: in training mode, with gradients, documents packed or padded."""

    def __init__(self, model: nn.Module, choices: Mapping[str, ops.Choice], device: torch.device) -> None:
        self.model: Any = model
        self.choices, self.device = choices, device

    def packed(self, sequences: Sequences, row: int, recorder: Recorder | None = None) -> LogProbs:
        """All sequences one behind the other in rows of `row` tokens, the last row's rest a document of its own."""
        rows: list[list[str]] = [[]]
        for name, tokens in sequences.items():
            if sum(len(sequences[each]) for each in rows[-1]) + len(tokens) > row:
                rows.append([])
            rows[-1].append(name)
        return self._scored(sequences, rows, row, recorder)

    def padded(self, sequences: Sequences, recorder: Recorder | None = None) -> LogProbs:
        """Each sequence in a row of its own, as long as the longest."""
        return self._scored(sequences, [[name] for name in sequences], max(map(len, sequences.values())), recorder)

    def alone(self, sequences: Sequences, recorder: Recorder | None = None) -> LogProbs:
        """Each sequence in a call of its own."""
        found: LogProbs = {}
        for name, tokens in sequences.items():
            found |= self._scored(sequences, [[name]], len(tokens), recorder)
        return found

    def _scored(self, sequences: Sequences, rows: Sequence[Sequence[str]], width: int, recorder: Recorder | None) -> LogProbs:
        places: list[Token | None] = []
        made: list[Row] = []
        for number, names in enumerate(rows):
            documents = [(name, list(sequences[name])) for name in names]
            rest = width - sum(len(tokens) for _, tokens in documents)
            documents += [("", [0] * rest)] if rest else []
            labels: list[int] = []
            for name, tokens in documents:
                labels += [*tokens[1:], IGNORE] if name else [IGNORE] * len(tokens)
                places += [(name, position) if name else None for position in range(len(tokens))]
            ids = list(itertools.chain.from_iterable(tokens for _, tokens in documents))
            made.append(Row(numpy.array(ids), numpy.array(labels), numpy.array([len(tokens) for _, tokens in documents]), 0, number))
        batch = on_device(with_following(stack(made, width), getattr(self.model, "predicts_ahead", 0)), self.device)
        if recorder:
            recorder.tokens(places)
        with (
            ops.installed(recorder.choices(self.choices) if recorder else self.choices),
            recorder.watching(self.model) if recorder else contextlib.nullcontext(),
        ):
            hidden = self.model(batch.tokens_BS, TrainContext.of(batch, windows_of(self.model)))
            hidden_BSD = hidden[0] if isinstance(hidden, tuple) else hidden
            labels_N = batch.labels_BS.flatten()
            found_N, _ = token_log_probs(hidden_BSD.flatten(0, 1), self.model.head_weight_VD, labels_N)
        values = found_N.detach().cpu().tolist()
        return {
            place: value
            for place, value, label in zip(places, values, labels_N.tolist(), strict=True)
            if place is not None and label != IGNORE
        }


@dataclasses.dataclass(frozen=True)
class Paths:
    """How the engine computes: most tokens of a step, most requests together, tokens in a cache block, whether prefixes are kept, whether steps of decoding have fixed shapes, as graphs (`auto`) or one by one (`eager`)."""

    budget: int = 4096
    together: int = 16
    block: int = 16
    prefix_cache: bool = False
    graphs: Literal["off", "auto", "eager"] = "off"


class GeneratorSide:
    """The embedded generator's engine on a model, stepped by hand."""

    def __init__(
        self, model: nn.Module, choices: Mapping[str, ops.Choice], device: torch.device, longest: int, paths: Paths, invariant: bool = True
    ) -> None:
        try:
            from intarsia_generation.engine.build import make_plain
            from intarsia_generation.engine.engine import Engine, Sizes
        except ImportError as error:
            raise UsageError("`intarsia rl parity` needs the embedded generator: install intarsia-generation.") from error
        make_plain(model)
        blocks = paths.together * -(-longest // paths.block) + 1
        sizes = Sizes(paths.block, blocks, paths.together, max(paths.budget, paths.together + 1), longest, paths.prefix_cache)
        self.engine = Engine(model, device, sizes, self._fill, choices=choices, invariant=invariant, graphs=paths.graphs)
        self.engine.begin(0)
        self.model, self.choices = model, choices
        self._weights: Mapping[str, torch.Tensor] = {}
        self._arrivals = itertools.count()

    def run(
        self,
        requests: Sequence[Request],
        recorder: Recorder | None = None,
        update_after: int | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Generated]:
        """All requests together; after `update_after` steps the weights change to these, as version 1."""
        from intarsia_generation.engine.request import Job

        found: dict[str, Any] = {}
        for request in requests:
            self.engine.add(Job(request, next(self._arrivals), None, functools.partial(found.__setitem__, request.id)))
        with self._telling(recorder):
            for step in itertools.count():
                if step == update_after and weights is not None:
                    self._weights = weights
                    self.engine.update(WeightVersion(1, "parity", {}, {}, {}))
                if not self.engine.step():
                    break
        for result in found.values():
            if isinstance(result, BaseException):
                raise result
        return found

    def _fill(self, weights: WeightVersion) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self._weights[name])

    @contextlib.contextmanager
    def _telling(self, recorder: Recorder | None) -> Iterator[None]:
        """Record calls of the model, and tell the recorder whose tokens each has."""
        if recorder is None:
            yield
            return
        context: Any = self.engine.context
        begin = context.begin

        def told(chunks: Any, *shown: Any) -> Any:
            recorder.tokens([(chunk.job.request.id, place) for chunk in chunks for place in range(chunk.start, chunk.end)])
            return begin(chunks, *shown)

        context.begin, self.engine.choices = told, recorder.choices(self.choices)
        try:
            with recorder.watching(self.model):
                yield
        finally:
            del context.begin
            self.engine.choices = dict(self.choices)


def log_probs_of(results: Mapping[str, Generated], prompts: Mapping[str, int]) -> LogProbs:
    """A generator's log-probabilities by the position that they follow from; `prompts` are the prompts' lengths."""
    return {(name, prompts[name] + number - 1): value for name, result in results.items() for number, value in enumerate(result.log_probs)}


def sampled(name: str, prompt: Sequence[int], tokens: int, seed: int) -> Request:
    """A request whose tokens are drawn."""
    return Request(name, tuple(prompt), Sampling(max_tokens=tokens, seed=seed))


def forced(name: str, tokens: Sequence[int], prompt: int) -> Request:
    """A request whose tokens are known from the prompt's end on."""
    rest = tuple(tokens[prompt:])
    return Request(name, tuple(tokens[:prompt]), Sampling(max_tokens=len(rest)), rest)
