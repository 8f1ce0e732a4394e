"""A generator that is nothing but its caches, for tests of what must be dropped with weights. Torch-free.

Its policy is arithmetic: a token's state follows from the state before it, the token's encoding and the media's, all of them under the weights of a version, which are one number
(`weights(version, seed)`). So every wrong entry of a cache shows in every later token.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from intarsia.contracts import Media
from intarsia.errors import UsageError
from intarsia_rl.contracts import Generated, GeneratorFacts, GeneratorStats, Request, WeightVersion

CACHES = ("prefix", "encoder", "media")


def weights(version: int, seed: int) -> WeightVersion:
    """A version of this policy's weights."""
    return WeightVersion(version, "in_hand", {"seed": seed}, {}, {})


class CachingGenerator:
    """An `intarsia_rl.contracts.Generator` with three caches: states of prefixes, encodings of tokens, encodings of media. Each is keyed by version, but those that are named `stale`."""

    def __init__(self, vocab_size: int = 64, stale: Collection[str] = ()) -> None:
        self.facts = GeneratorFacts("caching", vocab_size, 1024, 64, ("media",))
        self.stale = frozenset(stale)
        self.version, self._seed = -1, 0
        self.hits = dict.fromkeys(CACHES, 0)
        self._caches: dict[tuple[Any, ...], int] = {}
        self._generated = 0

    async def generate(self, request: Request, on_tokens: Callable[[Sequence[int]], None] | None = None) -> Generated:
        """Greedy."""
        if self.version < 0:
            raise UsageError("The generator has no weights.")
        tokens = list(request.tokens)
        log_probs = []
        for _ in range(request.sampling.max_tokens):
            await asyncio.sleep(0)
            state = self._state(tuple(tokens), tuple(each.media for each in request.media))
            tokens.append(state % self.facts.vocab_size)
            log_probs.append(-(1 + state % 9973) / 9973)
            if on_tokens is not None:
                on_tokens(tokens[-1:])
        made = tuple(tokens[len(request.tokens) :])
        self._generated += len(made)
        return Generated(request.id, made, tuple(log_probs), (self.version,) * len(made), "length")

    def _state(self, tokens: tuple[int, ...], media: tuple[Media, ...]) -> int:
        """What is known behind these tokens."""
        state = self._seed
        for each in media:
            state = _mixed(state, self._cached("media", each, functools.partial(_mixed, self._seed, each.data)))
        for end in range(1, len(tokens) + 1):
            token, before = tokens[end - 1], state
            encoded = self._cached("encoder", token, functools.partial(_mixed, self._seed, "encoder", token))
            state = self._cached("prefix", (media, tokens[:end]), functools.partial(_mixed, self._seed, before, encoded))
        return state

    def _cached(self, cache: str, key: Any, make: Callable[[], int]) -> int:
        place = (cache, key) if cache in self.stale else (cache, key, self.version)
        self.hits[cache] += place in self._caches
        if place not in self._caches:
            self._caches[place] = make()
        return self._caches[place]

    async def abort(self, requests: Sequence[str] | None = None) -> None:
        """Nothing is ever under way for long."""

    async def pause(self, keep: bool = True) -> None:
        """Nothing to do."""

    async def resume(self) -> None:
        """Nothing to do."""

    async def update(self, weights: WeightVersion, in_flight: Literal["continue", "drain"] = "continue") -> None:
        """Take weights."""
        if weights.version < self.version:
            raise UsageError(f"Version {weights.version} is older than {self.version}.")
        self.version, self._seed = weights.version, int(weights.location["seed"])

    async def stats(self) -> GeneratorStats:
        """Version and tokens."""
        return GeneratorStats(version=self.version, generated_tokens=self._generated)

    async def close(self) -> None:
        """Nothing to do."""


def _mixed(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "little")
