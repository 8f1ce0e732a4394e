"""A request in the making. Torch-free."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from intarsia.contracts import Tokenizer
from intarsia_rl.contracts import Finish, Generated, Request, Routes, Sampling

from intarsia_generation.text import IncrementalText

if TYPE_CHECKING:
    from intarsia_generation.engine.sight import Sight

OnTokens = Callable[[Sequence[int]], None]
OnEnd = Callable[[Generated | BaseException], None]


def stream_of(sampling: Sampling, prompt: Sequence[int]) -> random.Random:
    """The random numbers of a request: a function of its seed and its prompt, one for each token that is chosen."""
    text = f"{sampling.seed}/{','.join(map(str, prompt))}"
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest(), "little"))


class Job:
    """A request, what it has so far, and where its caches are.

    `tokens` are all that are known: prompt, forced and chosen ones. The caches hold the first `computed` of them, in `blocks`. `log_probs` and `versions` say which tokens behind the
    prompt are decided. `sight` is what it shows, None where that is nothing.
    """

    def __init__(
        self,
        request: Request,
        arrival: int,
        tokenizer: Tokenizer | None,
        on_end: OnEnd,
        on_tokens: OnTokens | None = None,
        sight: Sight | None = None,
    ) -> None:
        self.request, self.arrival, self.sight = request, arrival, sight
        self.on_end, self.on_tokens = on_end, on_tokens
        self.tokens: list[int] = [*request.tokens, *request.forced]
        self.prompt = len(request.tokens)
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.finish: Finish | None = None
        self.computed = 0
        self.blocks: list[int] = []
        self.names: list[bytes] = []
        self.row = -1
        self.cached_tokens: int | None = None
        self.routes: list[Any] = []
        self.random = stream_of(request.sampling, request.tokens)
        self._stop_ids = frozenset(request.sampling.stop_ids)
        self._text = None if tokenizer is None else IncrementalText(tokenizer, request.sampling.stop)
        self._untold: list[int] = []
        self._began = time.perf_counter()
        self._first_token_s = 0.0

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: the lower priority, then the earlier arrival."""
        return self.request.priority, self.arrival

    def shown(self, start: int, end: int) -> bytes:
        """Which images and video stand in tokens `start` to `end`, and where."""
        return b"" if self.sight is None else self.sight.key(start, end)

    @property
    def begun(self) -> bool:
        """Whether it has run before."""
        return self.cached_tokens is not None

    @property
    def decided(self) -> int:
        """Prompt and decided tokens."""
        return self.prompt + len(self.log_probs)

    @property
    def needed(self) -> int:
        """How many tokens the caches must hold for the next one to be chosen. Nothing follows the last token, which is never computed."""
        return min(len(self.tokens), self.prompt + self.request.sampling.max_tokens - 1)

    def take(self, token: int, log_prob: float, version: int) -> None:
        """Decide the next token; `finish` is set when it was the last. Forced tokens end nothing but by their number."""
        is_chosen = self.decided == len(self.tokens)
        if is_chosen:
            self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        self._first_token_s = self._first_token_s or time.perf_counter() - self._began
        self._untold.append(token)
        stopped = self._stops(token) if is_chosen else None
        self.finish = stopped or ("length" if len(self.log_probs) == self.request.sampling.max_tokens else None)

    def _stops(self, token: int) -> Finish | None:
        if token in self._stop_ids:
            return "eos"
        is_last = len(self.log_probs) == self.request.sampling.max_tokens
        return "stop" if self._text is not None and self._text.stops(token, is_last) else None

    def tell(self) -> None:
        """Show tokens that were decided since the last time."""
        if self._untold and self.on_tokens is not None:
            self.on_tokens(tuple(self._untold))
        self._untold = []

    def result(self, finish: Finish, routes: Routes | None) -> Generated:
        """What it has."""
        return Generated(
            request=self.request.id,
            tokens=tuple(self.tokens[self.prompt : self.decided]),
            log_probs=tuple(self.log_probs),
            versions=tuple(self.versions),
            finish=finish,
            routes=routes,
            cached_tokens=self.cached_tokens or 0,
            first_token_s=self._first_token_s,
            seconds_s=time.perf_counter() - self._began,
        )
