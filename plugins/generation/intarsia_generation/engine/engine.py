"""One step of all requests. Not for several threads: `generator` runs it on one.

plan -> caches' slots -> the model -> hidden states that decide something -> tokens -> requests that end
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from intarsia import ops
from intarsia.errors import IntarsiaError, NumericsError, UsageError
from intarsia_rl.contracts import Generated, GeneratorStats, Routes, WeightVersion
from torch import Tensor, nn

from intarsia_generation.engine.blocks import BlockPool
from intarsia_generation.engine.chosen import Row, decide, rows_of
from intarsia_generation.engine.context import arrangement
from intarsia_generation.engine.request import Job
from intarsia_generation.engine.routes import routes_of
from intarsia_generation.engine.runner import Runner
from intarsia_generation.engine.scheduler import Chunk, Scheduler
from intarsia_generation.engine.sight import Eyes
from intarsia_generation.engine.sizes import Sizes
from intarsia_generation.engine.static import Graphs

if TYPE_CHECKING:
    from intarsia_generation.engine.ranks import Team

logger = logging.getLogger("intarsia.generation")

_KERNELS = threading.Lock()
"""Kernels are in force for a process: several generators of one take turns."""


__all__ = ["Engine", "Sizes"]


class Engine:
    """A model, its caches and its requests. Stability: provisional.

    Arguments: `fill` puts weights into the model and raises where they are not what was published; `filled` says which version is whole in the model as it is now; `choices` are the kernels; `invariant` keeps every cache's entries where their positions are.
    `team` are the ranks among which the model is cut, of which this process is the first: they do what it does. `graphs`: whether steps of decoding are CUDA graphs, see `StaticSteps`; UsageError for `on` where that cannot be.
    `version` is None while no weights can be served.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        sizes: Sizes,
        fill: Callable[[WeightVersion], None],
        *,
        filled: Callable[[], int | None] = lambda: None,
        choices: Mapping[str, ops.Choice] | None = None,
        invariant: bool = False,
        team: Team | None = None,
        graphs: Graphs = "off",
    ) -> None:
        self.device, self.sizes, self.choices = device, sizes, dict(choices or {})
        self.team = team
        self._fill, self._filled = fill, filled
        self.version: int | None = None
        self.pool = BlockPool(sizes.blocks, sizes.block)
        self.runner = Runner(model, device, sizes, invariant=invariant, parts=None if team is None else team.parts, graphs=graphs)
        with _KERNELS, ops.installed(self.choices):
            self.runner.static.look_at_kernels()
        # A block can be read by another request; a state is that behind a request's last token, and of no other use.
        shares = sizes.prefix_cache and not self.runner.has_states
        if sizes.prefix_cache and not shares:
            logger.info("The prefix cache is off: %s keeps states, of which no past one is there to begin from", type(model).__name__)
        self.scheduler = Scheduler(self.pool, sizes.max_sequences, sizes.max_batch_tokens, shares, self._note_routes)
        self.context, self.routes = self.runner.context, self.runner.routes
        self.eyes = Eyes(model, device)
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.busy_s = 0.0

    def attach(self) -> None:
        """Called once by a thread that is going to call the others."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def close(self) -> None:
        """Called once by that thread when it ends."""
        if self.team is not None:
            self.team.close()

    @property
    def beat_s(self) -> float | None:
        """How long that thread may wait for something to do before it calls `beat`."""
        return None if self.team is None else self.team.beat_s

    def beat(self) -> None:
        """Nothing was to be done for so long."""
        if self.team is not None:
            self.team.beat()

    # ------------------------------------------------------------ requests

    def add(self, job: Job) -> None:
        """A request arrives."""
        self.scheduler.add(job)

    def end(self, job: Job, result: BaseException | Generated | None = None) -> None:
        """A request is over: with what it has, as aborted (None), or with an error."""
        if job in self.scheduler.running or job in self.scheduler.waiting:
            result = job.result("abort", self._routes(job)) if result is None else result
            self.scheduler.remove(job)
            job.on_end(result)

    def drop(self, job: Job) -> None:
        """Nobody waits for a request any more."""
        self.scheduler.remove(job)

    @property
    def jobs(self) -> list[Job]:
        """All requests, those that run first."""
        return [*self.scheduler.running, *self.scheduler.waiting]

    # ------------------------------------------------------------ weights

    def update(self, weights: WeightVersion) -> None:
        """Take weights, between two steps. What runs is computed anew under them before it goes on, so that no cache mixes versions."""
        if weights.version == self.version:
            return
        if self.version is not None and weights.version < self.version:
            raise UsageError(
                f"The generator has weights of version {self.version} and was given version {weights.version}: weights never go back. Start another "
                "generator for older ones."
            )
        # From here on nothing is served until the new weights are there and were read back: half-filled ones must give no token.
        before, self.version = self.version, None
        try:
            self._fill(weights)
        except BaseException:
            # Refused before anything was touched: the old weights are whole.
            self.version = before if before is not None and self._filled() == before else None
            raise
        self.begin(weights.version)

    def begin(self, version: int) -> None:
        """The model has the weights of this version."""
        self.scheduler.set_version(version)
        self.eyes.forget()
        self.runner.static.refresh("weights lie elsewhere")
        self.version = version

    # ------------------------------------------------------------ a step

    def step(self, admit: bool = True) -> bool:
        """Compute what is next. Whether there was anything. Where that fails, the requests that it was for end with the error."""
        if self.version is None:
            return False
        chunks = self.scheduler.plan(admit)
        if not chunks:
            return False
        start = time.perf_counter()
        try:
            with _KERNELS, torch.no_grad(), ops.installed(self.choices):
                rows, tokens, log_probs, unsound = self._decisions(chunks)
        except Exception as error:
            if self.team is not None:
                self.team.end(error)
            # A step that fails would fail again. What blocks are said to hold may not be in them.
            for chunk in chunks:
                chunk.job.computed = min(chunk.job.computed, chunk.start)
                self.end(chunk.job, error if isinstance(error, IntarsiaError) else RuntimeError(f"A step of the generator failed: {error}"))
            self._start_over()
        else:
            # Whoever is told something now finds the process's own kernels in force.
            self._take(rows, tokens, log_probs, unsound)
        self.busy_s += time.perf_counter() - start
        return True

    def _decisions(self, chunks: list[Chunk]) -> tuple[list[Row], list[int], list[float], list[Job]]:
        """Run the model; what was decided, with tokens and log-probabilities; and the requests of which a token that decides nothing is not sound."""
        rows: list[Row] = []
        hidden: list[Tensor] = []
        unsound: list[Job] = []
        parts = [[chunk for chunk in chunks if chunk.decode == is_decode] for is_decode in (True, False)]
        calls = [sorted(part, key=arrangement) for part in parts if part]
        extras = [self.eyes.extra_of(call) for call in calls]
        if self.team is not None:
            self.team.step([(call, [row.place for row in rows_of(call)], extra) for call, extra in zip(calls, extras, strict=True)])
        for call, extra in zip(calls, extras, strict=True):
            some_ND, some = self._computed(call, extra, unsound)
            hidden.append(some_ND)
            rows += some
        tokens, log_probs = decide(self.runner.logits, torch.cat(hidden) if len(hidden) > 1 else hidden[0], rows)
        return rows, tokens, log_probs, unsound

    def _computed(self, chunks: Sequence[Chunk], extra: Mapping[str, Any] | None, unsound: list[Job]) -> tuple[Tensor, list[Row]]:
        """Run the model on chunks of one kind and what they show; the rows that decide something, and their hidden states."""
        hidden_ND = self.runner.hidden(chunks, extra)
        # A device computes meanwhile: nothing has waited for it yet.
        rows = rows_of(chunks)
        for chunk in chunks:
            self.prompt_tokens += max(0, min(chunk.end, chunk.job.prompt) - chunk.start)
        if len(rows) < hidden_ND.shape[0]:
            # What decides something is seen by its log-probability. The rest is in the caches as well, and would be left there.
            sound_N = hidden_ND.isfinite().all(-1).tolist()
            ends = itertools.accumulate(chunk.end - chunk.start for chunk in chunks)
            unsound += [chunk.job for chunk, end in zip(chunks, ends, strict=True) if not all(sound_N[end - chunk.end + chunk.start : end])]
        return self.runner.chosen(hidden_ND, [row.place for row in rows]), rows

    def _take(self, rows: Sequence[Row], tokens: Sequence[int], log_probs: Sequence[float], jobs: Sequence[Job]) -> None:
        """Give each request its tokens; those that have all end, and those that are not sound: `jobs`, and whose log-probabilities are not finite."""
        version = self.version
        assert version is not None, "there are no weights"
        unsound = {id(job): job for job in jobs}
        for row, token, log_prob in zip(rows, tokens, log_probs, strict=True):
            if not math.isfinite(log_prob):
                unsound[id(row.job)] = row.job
            elif id(row.job) not in unsound:
                row.job.take(token, log_prob, version)
                self.generated_tokens += row.token is None
        for job in {id(row.job): row.job for row in rows if id(row.job) not in unsound}.values():
            job.tell()
            if job.finish is not None:
                result = job.result(job.finish, self._routes(job))
                self.cached_tokens += result.cached_tokens
                self.scheduler.remove(job)
                job.on_end(result)
        for job in unsound.values():
            text = f"The model gives logits that are not finite for request {job.request.id!r} under weights of version {version}: they are not sound."
            self.end(job, NumericsError(text))
        if unsound:
            self._start_over()

    def _start_over(self) -> None:
        """Nothing in the caches is trusted any more; what runs is computed anew."""
        self.scheduler.set_version(-1 if self.version is None else self.version)
        if self.team is not None:
            self.team.clear()
        self.runner.clear()
        self.eyes.forget()

    # ------------------------------------------------------------ routes

    def _note_routes(self, job: Job) -> None:
        """Read the choices that go with caches which are about to be dropped: a token's experts are those that it was computed with first."""
        known = sum(part.shape[0] for part in job.routes)
        end = min(job.computed, job.decided)
        if job.request.routes and self.routes.serves and known < end:
            size = self.sizes.block
            job.routes.append(self.routes.read([job.blocks[place // size] * size + place % size for place in range(known, end)]))

    def _routes(self, job: Job) -> Routes | None:
        self._note_routes(job)
        return routes_of(job.routes) if job.routes else None

    # ------------------------------------------------------------ how it is

    def stats(self, paused: bool) -> GeneratorStats:
        """As the contract has it."""
        return GeneratorStats(
            version=-1 if self.version is None else self.version,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            cache_used=self.pool.used / self.pool.count,
            busy_s=self.busy_s,
            paused=paused,
            graphs=self.runner.static.text,
        )
