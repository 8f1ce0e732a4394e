"""The real engine against the trainer, bit for bit, in the batch-invariant mode: one engine for each model and dtype."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import chz
import pytest
import torch
from intarsia import device as devices
from intarsia import ops
from intarsia.config import Recipe
from intarsia.config.resolve import resolve
from intarsia.plugins import current
from intarsia_eager.context import TrainContext
from intarsia_generation.engine.build import build as build_local
from intarsia_generation.engine.config import LocalConfig
from intarsia_rl.algorithms.operators import token_log_probs
from intarsia_rl.contracts import Generated, GeneratorContext, Request, Sampling
from intarsia_rl.weights.build import build_model, fill_initial
from intarsia_vllm.config import VllmConfig
from intarsia_vllm.generator import VllmGenerator, build

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

MODELS = [
    ("llama3/debug", "float32"),
    ("llama3/debug", "bfloat16"),
    ("deepseek_v3/debug", "float32"),
    ("deepseek_v3/debug", "bfloat16"),
    ("qwen3/moe-debug", "bfloat16"),
    ("qwen3_vl/debug", "float32"),
]
CHUNK = 48
"""Tokens of one forward pass of vLLM: prompts that are longer are read in chunks."""


class Side:
    """An engine, and the trainer's model with the same weights."""

    def __init__(self, name: str, dtype: str) -> None:
        recipe = resolve(name, [f"precision.compute={dtype}"], ["batch_invariant"]).recipe
        # Text for all of them: runs that show images are refused, families that could see them are not.
        self.recipe: Recipe = chz.replace(recipe, data=resolve(MODELS[0][0]).recipe.data, overrides=())
        self.loop = asyncio.Runner()
        settings = VllmConfig(max_tokens=256, cache_mib=64, batched_tokens=CHUNK, max_sequences=8)
        self.generator: VllmGenerator = self.loop.run(self._start(settings))
        self.model: Any = build_model(self.recipe, current(), "cpu", dtype).train().requires_grad_(True)
        fill_initial(self.model, self.recipe, current())
        self.choices = ops.select(dict(self.recipe.kernels), current(), devices.capabilities(), dtype, invariant=True).choices
        self.number = 0

    async def _start(self, settings: VllmConfig) -> VllmGenerator:
        return build(settings, GeneratorContext(self.recipe, current(), invariant=True, initial=True))

    def generate(self, *requests: tuple[Sequence[int], Sampling, Sequence[int]], routes: bool = False) -> list[Generated]:
        """All at once."""

        async def all_of_them() -> list[Generated]:
            names = []
            for _ in requests:
                self.number += 1
                names.append(f"request-{self.number}")
            made = [
                Request(name, tuple(tokens), sampling, tuple(forced), routes)
                for name, (tokens, sampling, forced) in zip(names, requests, strict=True)
            ]
            return await asyncio.gather(*map(self.generator.generate, made))

        return self.loop.run(all_of_them())

    def embedded(self, *requests: tuple[Sequence[int], Sampling, Sequence[int]], routes: bool = False) -> list[Generated]:
        """The same by the generator `local`."""

        async def all_of_them() -> list[Generated]:
            context = GeneratorContext(self.recipe, current(), invariant=True, initial=True)
            generator = build_local(LocalConfig(max_tokens=256, cache_bytes=64 << 20, device="cpu"), context)
            made = [
                Request(f"request-{number}", tuple(tokens), sampling, tuple(forced), routes)
                for number, (tokens, sampling, forced) in enumerate(requests)
            ]
            found = await asyncio.gather(*map(generator.generate, made))
            await generator.close()
            return list(found)

        return self.loop.run(all_of_them())

    def train(self, rows: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]]) -> list[tuple[float, ...]]:
        """The trainer's log-probabilities of completions: rows of packed (prompt, completion), padded to the longest."""
        width = max(sum(len(p) + len(c) for p, c in row) for row in rows)
        tokens, labels, positions, documents, lengths, spans = [], [], [], [], [], []
        for number, row in enumerate(rows):
            t, lab, pos, doc = [], [], [], []
            for which, (prompt, completion) in enumerate(row):
                ids = [*prompt, *completion]
                spans.append((number, len(t) + len(prompt) - 1, len(completion)))
                t += ids
                lab += [*ids[1:], 0]
                pos += range(len(ids))
                doc += [which] * len(ids)
            rest = width - len(t)
            lengths.append((*(len(p) + len(c) for p, c in row), *([rest] if rest else [])))
            tokens.append(t + [0] * rest)
            labels.append(lab + [0] * rest)
            positions.append(pos + list(range(rest)))
            documents.append(doc + [len(row)] * rest)
        context = TrainContext(torch.tensor(positions), torch.tensor(documents), tuple(lengths))
        with ops.installed(self.choices):
            hidden = self.model(torch.tensor(tokens), context)
            found, _ = token_log_probs(hidden.flatten(0, 1), self.model.head_weight_VD, torch.tensor(labels).flatten())
        found = found.view(len(rows), width)
        return [tuple(found[row, first : first + count].tolist()) for row, first, count in spans]


@pytest.fixture(scope="module", params=MODELS, ids=lambda each: "-".join(each))
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    made = Side(*request.param)
    yield made
    made.loop.run(made.generator.close())
    made.loop.close()


def prompts(count: int, first: int = 5, step: int = 15) -> list[list[int]]:
    return [[(i * 7 + k * 13 + k * i) % 250 for i in range(first + step * k)] for k in range(count)]


GREEDY = Sampling(12, temperature=0.0)


def test_decoding_gives_the_trainers_log_probabilities(side: Side) -> None:
    asked = prompts(4)
    found = side.generate(*((prompt, Sampling(12, seed=number), ()) for number, prompt in enumerate(asked)))
    assert [len(each.tokens) for each in found] == [12] * 4
    pairs = [(prompt, each.tokens) for prompt, each in zip(asked, found, strict=True)]
    packed = side.train([pairs[:1], pairs[1:4]])
    alone = [side.train([[pair]])[0] for pair in pairs]
    assert packed == alone
    assert [each.log_probs for each in found] == alone


def test_batch_is_alone_and_a_cached_prefix_is_fresh(side: Side) -> None:
    asked = [list(reversed(prompt)) for prompt in prompts(4)]
    together = side.generate(*((prompt, GREEDY, ()) for prompt in asked))
    alone = [side.generate((prompt, GREEDY, ()))[0] for prompt in asked]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert [each.log_probs for each in together] == [each.log_probs for each in alone]
    assert any(each.cached_tokens for each in alone)


def test_a_prompt_in_chunks_is_a_prompt_at_once(side: Side) -> None:
    (prompt,) = [[(i * i + 3) % 250 for i in range(2 * CHUNK + 7)]]
    found = side.generate((prompt, GREEDY, ()))[0]
    assert found.cached_tokens == 0
    assert found.log_probs == side.train([[(prompt, found.tokens)]])[0]


def test_forced_tokens_are_scored_as_they_were_generated(side: Side) -> None:
    asked = prompts(4, first=9)
    found = side.generate(*((prompt, GREEDY, ()) for prompt in asked))
    scored = side.generate(*((prompt, Sampling(12), each.tokens) for prompt, each in zip(asked, found, strict=True)))
    assert [each.log_probs for each in scored] == [each.log_probs for each in found]
    assert [each.tokens for each in scored] == [each.tokens for each in found]
    assert {each.finish for each in scored} == {"length"}


def test_the_embedded_generator_gives_the_same(side: Side) -> None:
    """Greedy and drawn tokens, log-probabilities of forced ones, and the experts of a mixture."""
    asked = prompts(3, first=7)
    jobs = [
        (asked[0], GREEDY, ()),
        (asked[1], Sampling(12, temperature=0.7, top_p=0.9, seed=5), ()),
        (asked[2], Sampling(12, top_k=20, min_p=0.01, seed=6), ()),
        (asked[1], Sampling(8), asked[0][:8]),
        (asked[2], Sampling(8, seed=7), asked[0][:4]),
    ]
    routes = "routes" in side.generator.facts.capabilities
    found, expected = side.generate(*jobs, routes=routes), side.embedded(*jobs, routes=routes)
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.log_probs, one.finish, one.routes) == (other.tokens, other.log_probs, other.finish, other.routes)
        assert (one.routes is not None) == routes
