"""The relations that the mode promises, each shown by two passes over the same tokens."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from intarsia import device as devices
from intarsia import ops
from intarsia.config import Recipe
from intarsia.errors import UsageError
from intarsia.plugins import Plugins
from torch import nn

from intarsia_rl.invariant.parity.record import Difference, Recorder, first_difference
from intarsia_rl.invariant.parity.sides import GeneratorSide, LogProbs, Paths, Trainer, forced, log_probs_of, sampled
from intarsia_rl.weights.build import build_model, fill_initial

Pass = Callable[[Recorder | None], LogProbs]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a relation came out. `difference` is None where both passes are equal, and where the first place could not be told."""

    relation: str
    compared: int
    differing: int
    largest: float
    difference: Difference | None = None
    note: str = ""

    @property
    def equal(self) -> bool:
        """Whether every log-probability is."""
        return self.compared > 0 and not self.differing


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much is compared: sequences of up to `tokens` tokens, drawn by `seed`."""

    sequences: int = 6
    tokens: int = 72
    seed: int = 0


class Parity:
    """Both sides of a recipe, on this machine, with weights as the run begins with."""

    def __init__(self, recipe: Recipe, plugins: Plugins, settings: Settings, invariant: bool = True) -> None:
        self.recipe, self.plugins, self.settings, self.invariant = recipe, plugins, settings, invariant
        self.device = devices.select(recipe.train.device)
        self.choices = ops.select(recipe.kernels, plugins, devices.capabilities(), recipe.precision.compute, invariant=invariant).choices
        longest = min(settings.tokens, recipe.model.max_positions)
        if longest < 24:
            raise UsageError(f"Sequences of {longest} tokens show nothing: give at least 24 (--tokens, model.max_positions).")
        self.longest = longest
        draws = random.Random(settings.seed)
        self.prompts: dict[str, list[int]] = {}
        for number in range(settings.sequences):
            length = 1 if number == 0 else draws.randint(2, longest // 2)
            self.prompts[f"s{number}"] = [draws.randrange(recipe.model.vocab_size) for _ in range(length)]
        # One sequence begins as another does, so that a cached prefix can be met.
        if settings.sequences > 2:
            first = self.prompts["s1"] = [draws.randrange(recipe.model.vocab_size) for _ in range(longest // 2 + 5)]
            self.prompts["s2"] = [*first[:-2], draws.randrange(recipe.model.vocab_size)]
        self.trainer = Trainer(self._model().train().requires_grad_(True), self.choices, self.device)
        self.tokens: dict[str, list[int]] = {}

    def _model(self) -> nn.Module:
        model = build_model(self.recipe, self.plugins, self.device, self.recipe.precision.compute)
        fill_initial(model, self.recipe, self.plugins)
        return model

    def _generator(self, paths: Paths | None = None) -> GeneratorSide:
        return GeneratorSide(self._model(), self.choices, self.device, self.longest, paths or Paths(), self.invariant)

    # ------------------------------------------------------------ passes

    def _decoded(self, recorder: Recorder | None) -> LogProbs:
        """The generator's own tokens, one at a time, all sequences together. The first call says which tokens they are."""
        requests = [sampled(name, prompt, self._budget(prompt), self.settings.seed) for name, prompt in self.prompts.items()]
        results = self._generator().run(requests, recorder)
        if not self.tokens:
            self.tokens = {name: [*prompt, *results[name].tokens] for name, prompt in self.prompts.items()}
        return log_probs_of(results, {name: len(prompt) for name, prompt in self.prompts.items()})

    def _budget(self, prompt: Sequence[int]) -> int:
        return self.longest - len(prompt)

    def _decoded_alone(self, recorder: Recorder | None) -> LogProbs:
        found: LogProbs = {}
        for name, prompt in self.prompts.items():
            result = self._generator().run([sampled(name, prompt, self._budget(prompt), self.settings.seed)], recorder)
            found |= log_probs_of(result, {name: len(prompt)})
        return found

    def _scored(self, paths: Paths, repeats: int = 1) -> Pass:
        def scored(recorder: Recorder | None) -> LogProbs:
            side = self._generator(paths)
            requests = [forced(name, tokens, 1) for name, tokens in self.tokens.items()]
            for repeat in range(repeats):
                is_last = repeat == repeats - 1
                # Of a prefix that was read nothing is scored: what follows the prompt is.
                if is_last and repeats > 1:
                    requests = [forced(name, tokens, len(self.prompts[name])) for name, tokens in self.tokens.items()]
                results = side.run(requests, recorder if is_last else None)
            if repeats > 1 and not sum(result.cached_tokens for result in results.values()):
                raise UsageError("No prefix was read from the cache: give longer sequences (--tokens), so that this can be shown.")
            return log_probs_of(results, {request.id: len(request.tokens) for request in requests})

        return scored

    def _trained(self, how: str) -> Pass:
        def trained(recorder: Recorder | None) -> LogProbs:
            if how == "packed":
                return self.trainer.packed(self.tokens, 3 * self.longest + 7, recorder)
            return self.trainer.padded(self.tokens, recorder) if how == "padded" else self.trainer.alone(self.tokens, recorder)

        return trained

    # ------------------------------------------------------------ relations

    def outcomes(self) -> Iterator[Outcome]:
        """Every relation, one after the other."""
        whole = self._scored(Paths())
        together = self._decoded
        together(None)
        yield self._compared("decode = trainer", self._trained("packed"), together)
        yield self._compared("batch = alone (generator)", together, self._decoded_alone)
        yield self._compared("batch = alone (trainer)", self._trained("packed"), self._trained("alone"))
        yield self._compared("padded = packed", self._trained("packed"), self._trained("padded"))
        yield self._compared("scored = decode", together, whole)
        yield self._compared("chunked = whole", whole, self._scored(Paths(budget=7, together=3)))
        yield self._compared("prefix hit = fresh", whole, self._scored(Paths(prefix_cache=True), repeats=2))
        yield from self._in_fixed_shapes(together)
        yield self._updated()

    def _compared(self, relation: str, one: Pass, other: Pass) -> Outcome:
        left, right = one(None), other(None)
        common = sorted(left.keys() & right.keys())
        gaps = {token: abs(left[token] - right[token]) for token in common if left[token] != right[token]}
        if not gaps:
            return Outcome(relation, len(common), 0, 0.0)
        records = Recorder(), Recorder()
        one(records[0])
        other(records[1])
        found = first_difference(*records)
        if found is None:  # All that modules gave is equal: it is what comes behind them.
            token = min(gaps, key=lambda token: (token[1], token[0]))
            found = Difference("head", "linear or token_log_probs", token, gaps[token])
        return Outcome(relation, len(common), len(gaps), max(gaps.values()), found)

    def _in_fixed_shapes(self, decoded: Pass) -> Iterator[Outcome]:
        """The same tokens by steps in fixed shapes, CUDA graphs where there are some; nothing of a model whose steps cannot be. Modules are not watched in a graph, so that no first difference is told."""
        side = self._generator(Paths(graphs="auto" if self.device.type == "cuda" else "eager"))
        requests = [sampled(name, prompt, self._budget(prompt), self.settings.seed) for name, prompt in self.prompts.items()]
        found = log_probs_of(side.run(requests), {name: len(prompt) for name, prompt in self.prompts.items()})
        static = side.engine.runner.static
        if not static.reason:
            expected = decoded(None)
            gaps = [abs(value - expected.get(token, math.inf)) for token, value in found.items() if value != expected.get(token)]
            yield Outcome("fixed shapes = decode", len(found), len(gaps), max(gaps, default=0.0), note=static.text)

    def _updated(self) -> Outcome:
        """Requests that go on through an update of the weights: tokens of either version against a trainer that has its weights."""
        relation = "before = after update"
        side = self._generator()
        moved = self._moved(side.model)
        requests = [sampled(name, prompt, self._budget(prompt), self.settings.seed) for name, prompt in self.prompts.items()]
        results = side.run(requests, update_after=6, weights=moved)
        tokens = {name: [*prompt, *results[name].tokens] for name, prompt in self.prompts.items()}
        found = log_probs_of(results, {name: len(prompt) for name, prompt in self.prompts.items()})
        versions = {
            (name, len(self.prompts[name]) + number - 1): version
            for name, result in results.items()
            for number, version in enumerate(result.versions)
        }
        trainer = Trainer(self._model().train().requires_grad_(True), self.choices, self.device)
        expected = {0: trainer.packed(tokens, 3 * self.longest + 7)}
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                parameter.copy_(moved[name])
        expected[1] = trainer.packed(tokens, 3 * self.longest + 7)
        gaps = [
            abs(value - expected[versions[token]][token]) for token, value in found.items() if value != expected[versions[token]][token]
        ]
        stale = sum(versions[token] == 1 and value == expected[0][token] for token, value in found.items())
        counts = [list(versions.values()).count(version) for version in (0, 1)]
        note = f"{counts[0]} tokens before, {counts[1]} after" + (f", {stale} of them as before" if stale else "")
        return Outcome(relation, len(found), len(gaps), max(gaps, default=0.0), note=note)

    def _moved(self, model: nn.Module) -> Mapping[str, Any]:
        """Other weights: these and some noise."""
        generator = torch.Generator().manual_seed(self.settings.seed + 1)
        moved = {}
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            moved[name] = parameter.detach() + 0.02 * noise
        return moved
