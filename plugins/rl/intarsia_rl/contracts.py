"""What the parts of reinforcement learning hand to each other. Torch-free values and Protocols.

Token ids are made once, by the generator, and travel with all that is known of them: log-probability, policy version, routing. Nothing is tokenised again.
A log-probability is natural, of the token under the model at temperature 1 with nothing left out, in float32. The policy's version is the number of optimizer steps that
made its weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from intarsia.contracts import Media, ToolSpec, Turn
from intarsia.contracts.environment import Boundary, EnvironmentFailure

# ---------------------------------------------------------------- generation

Finish = Literal["length", "eos", "stop", "abort"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Stability: provisional.

    `temperature` 0 is greedy. `stop` are texts, `stop_ids` tokens that end a completion (the token or text stays part of it). A request's tokens are a function of
    (weights, prompt, `seed`, this): of nothing else that is running.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedMedia:
    """An image or a video in a run of tokens: its block, as the run's processor writes it, begins at token `at`. Placeholders elsewhere are tokens like any other. Stability: provisional."""

    media: Media
    at: int


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One completion that is asked for. Stability: provisional.

    `tokens` is the whole prompt. `forced` are tokens that are taken in place of chosen ones, in order (scoring; `sampling.max_tokens` is then their number). `routes`: report the
    experts. `priority`: lower is served earlier; equal ones in the order of arrival. `media`: images and video, in order, in prompt and forced tokens.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    forced: tuple[int, ...] = ()
    routes: bool = False
    priority: int = 0
    media: tuple[PlacedMedia, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Routes:
    """Experts that routers chose: little-endian int16 of shape [tokens, MoE layers, K], for the prompt's tokens and all generated ones but the last. Stability: provisional."""

    data: bytes
    shape: tuple[int, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Generated:
    """A completion. Stability: provisional.

    `tokens` are all generated ones, the one that ended it included; `log_probs` and `versions` one for each. `finish`: `length`, `eos` (a stop id), `stop` (a stop text) or
    `abort`. `cached_tokens` of the prompt came from the prefix cache.
    """

    request: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    routes: Routes | None = None
    cached_tokens: int = 0
    first_token_s: float = 0.0
    seconds_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class GeneratorFacts:
    """What a generator is. `max_tokens`: prompt and completion together; `capabilities` of: forced, routes, media, invariant, graphs (decoding as CUDA graphs). Stability: provisional."""

    name: str
    vocab_size: int
    max_tokens: int
    max_sequences: int
    capabilities: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class GeneratorStats:
    """How it is at the moment; counts since it was built. `graphs` says in words which CUDA graphs steps are, or why none. Stability: provisional."""

    version: int = -1
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    cache_used: float = 0.0
    busy_s: float = 0.0
    paused: bool = False
    graphs: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class WeightVersion:
    """Weights that a trainer has published. Stability: provisional.

    `transport` is the entry that can read `location` (JSON). `digests` maps canonical parameter and persistent buffer names to the digest of their bytes as published; `dtypes` to their
    dtype's name, `shapes` to the whole tensor's shape.
    """

    version: int
    transport: str
    location: Mapping[str, Any]
    digests: Mapping[str, str]
    dtypes: Mapping[str, str]
    shapes: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Generator(Protocol):
    """Built by `target(config, context: GeneratorContext)` in a process of its own. Stability: provisional.

    All calls may overlap. `generate` raises UsageError for a request that can never be served (too long, a token outside of the vocabulary, a capability that is missing), and
    EnvironmentFailure("environment") for one that shows a medium which cannot be used (`media.used`).
    """

    facts: GeneratorFacts

    async def generate(self, request: Request, on_tokens: Callable[[Sequence[int]], None] | None = None) -> Generated:
        """The completion; `on_tokens` is told of further tokens as they come. Cancelling the call aborts the request."""

    async def abort(self, requests: Sequence[str] | None = None) -> None:
        """End these requests (None: all) with what they have; their `generate` returns with finish `abort`. Unknown ids are ignored."""

    async def pause(self, keep: bool = True) -> None:
        """Compute no further token until `resume`. `keep`: requests stay where they are; else those that run are finished first, and none is begun."""

    async def resume(self) -> None:
        """Go on."""

    async def update(self, weights: WeightVersion, in_flight: Literal["continue", "drain"] = "continue") -> None:
        """Take these weights, at a border between tokens; returns when they are in force and were read back and compared with `digests` (NumericsError, naming the tensors, otherwise: the old
        weights stay or the generator refuses to serve). Requests that run go on with the new weights (their caches are made anew or dropped, never mixed), or are finished with the
        old ones first (`drain`). The version it has already is taken at once; one that is older is refused (UsageError). Every cache is keyed by version. An update
        that was interrupted leaves the old version in force, or none."""

    async def stats(self) -> GeneratorStats:
        """How it is."""

    async def close(self) -> None:
        """End."""


@dataclasses.dataclass(frozen=True)
class GeneratorContext:
    """What a generator is built with. Stability: provisional.

    `recipe` is the run's; `plugins` this process's; `invariant` asks for batch-invariant operators. The generator has no weights before its first `update`, unless `initial` is True: then it
    begins with the run's initial weights as version 0 (`train.init_from`, or what the seed draws).
    """

    recipe: Any
    plugins: Any
    invariant: bool = False
    initial: bool = False
    index: int = 0


@runtime_checkable
class Routing(Protocol):
    """Which generator gets a request. Built by `target(config)`. Torch-free. Stability: provisional."""

    def choose(self, request: Request, loads: Mapping[int, int]) -> int:
        """One of the keys of `loads`: generators that live, with the number of requests each has."""


@runtime_checkable
class WeightTransport(Protocol):
    """The trainer's side of pushing weights. Built by `target(config, directory)`; the target is a class. Stability: provisional.

    `reader` is the generator's side, `"module:function"`, an attribute of the class: `read(location, names, boxes=None)` yields (name, CPU or device tensor), of the whole tensors,
    or for a name that is in `boxes` of each of its boxes; a tensor holds until the next one is asked for. DistributedError where the version can no longer be read whole.
    A reader that has a parameter `device` is told where the model is, and may give tensors there.
    """

    reader: str

    def publish(self, version: int, parts: Mapping[str, Any]) -> WeightVersion | None:
        """Make the weights readable; `parts` are the run's (model, parameters, mesh ...). A collective; rank 0 gets the version. Publishing a version again gives the same."""

    def retire(self, version: int) -> None:
        """Nobody reads this version any more."""

    def close(self) -> None:
        """Remove everything."""


# ---------------------------------------------------------------- text and tokens


@runtime_checkable
class Renderer(Protocol):
    """Turns to tokens, and generated tokens to a turn; never the same twice. Built by `target(config, tokenizer)`. Torch-free where its tokenizer is. Stability: provisional.

    A template may rewrite what it rendered before (drop reasoning of earlier turns): `extend` then gives None, and the loop begins a new segment by `begin`.
    Where the run has a processor, a turn's content may hold token ids between texts, in the place of media: they are taken as they are.
    """

    stop_ids: tuple[int, ...]

    def begin(self, turns: Sequence[Turn], tools: Sequence[ToolSpec]) -> list[int]:
        """All tokens of a history up to where the policy speaks. A turn that carries `tokens` is rendered by these very ids."""

    def extend(self, turns: Sequence[Turn], new: Sequence[Turn], tools: Sequence[ToolSpec], finish: Finish) -> list[int] | None:
        """Tokens between the last generated token (`finish` says how it came to be the last) and where the policy speaks again, `new` being the turns since. None: this history has
        to be rendered anew."""

    def parse(self, tokens: Sequence[int], finish: Finish) -> Turn:
        """The assistant's turn that these generated tokens are, with its tool calls and `tokens`. What is no valid call stays text."""


# ---------------------------------------------------------------- samples


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens that was one context of the policy. Stability: provisional.

    For each token: whether it is `trained` (the policy generated it), its `log_probs` and `versions` (0.0 and -1 where it did not). `actor` names the policy; `media` are those that it saw.
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    routes: Routes | None = None
    actor: str = "policy"
    media: tuple[PlacedMedia, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a try counts for nothing. Stability: provisional."""

    boundary: Boundary
    message: str
    attempts: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One try at a task: what is trained on, and what is shown. Stability: provisional.

    `reward` is the weighted sum of `rewards` (rubrics by name; `steps` is the sum of the steps' own). A sample with a `failure` has reward 0 and is never trained on. `truncated`: a limit ended it.
    `reference_log_probs`, where a reference is asked for, and `audit_log_probs` (what a generator at version `audit_version` gives for the same tokens) are for each segment
    and token; of an audit nan where a replayed choice of experts is not the generator's any more.
    """

    id: str
    group: int
    member: int
    task: str
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...] = ()
    reward: float = 0.0
    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    timings_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    truncated: bool = False
    failure: Failure | None = None
    reference_log_probs: tuple[tuple[float, ...], ...] | None = None
    audit_log_probs: tuple[tuple[float, ...], ...] | None = None
    audit_version: int = -1

    @property
    def trained_tokens(self) -> int:
        """How many tokens the policy generated."""
        return sum(sum(segment.trained) for segment in self.segments)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version in it; None where nothing was generated."""
        versions = [version for segment in self.segments for version in segment.versions if version >= 0]
        return min(versions, default=None)


@runtime_checkable
class Algorithm(Protocol):
    """What rewards mean, and the loss. Built by `target(config)`. The controller calls the first four; torch-free but for what `loss` imports. Stability: provisional."""

    needs_reference: bool

    def advantages(self, samples: Sequence[Sample]) -> Sequence[float]:
        """One advantage for each sample of a group (failed ones are not among them). Finite: a group of one, and one of equal rewards, give 0."""

    def keeps(self, samples: Sequence[Sample], advantages: Sequence[float]) -> bool:
        """Whether the group is trained on (dynamic sampling leaves out groups that teach nothing)."""

    def token_weight(self, sample: Sample) -> float:
        """The weight of each trained token of a sample in the sum that is divided by the counts of the whole step."""

    def count(self, sample: Sample) -> int:
        """What the sample adds to the divisor."""

    def loss(self, log_probs_N: Any, extra: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """The weighted sum over N trained tokens (0-d tensor with gradient), and further detached sums by name. `log_probs_N` float32 are the trainer's. `extra`, tensors [N]: `old_log_probs`,
        `advantages`, `weights`, `versions`, `entropy` (of the trainer's distribution there, with gradient), and `reference_log_probs` where asked for."""


# ---------------------------------------------------------------- processes


@runtime_checkable
class Process(Protocol):
    """A started process that serves calls. Stability: provisional."""

    name: str

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call the service's method there; its exception is raised here (errors of ours and EnvironmentFailure with their class, others as RemoteError). `ProcessDied` where the process is gone;
        TimeoutError after `timeout_s`. Arguments and results are plain values, bytes and the contracts' dataclasses. A call that is cancelled is cancelled there."""

    def on_message(self, callback: Callable[[str, Any], None]) -> None:
        """Have `callback(kind, value)` called for what the service sends unasked."""

    async def stop(self, grace_s: float = 5.0) -> None:
        """End it: asked, then killed. May be called twice."""

    async def died(self) -> str:
        """Return when the process has ended without `stop`, with the reason."""


class ProcessDied(Exception):
    """The process that was called is gone; nothing is known of what it was doing. `name` is the process's. Stability: provisional."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name} is gone: {reason}")
        self.name, self.reason = name, reason


class Bystander(EnvironmentFailure):
    """A try was under way in a process that something else there has ended. It may be tried again, and is no attempt of its own. Stability: provisional."""

    def __init__(self, boundary: Boundary, message: str):
        super().__init__(boundary, message, retry=True)


@runtime_checkable
class ProcessLauncher(Protocol):
    """Starts processes. Built by `target(config)`. Torch-free. Stability: provisional."""

    async def start(self, name: str, service: str, arguments: Mapping[str, Any], threads: int | None = None) -> Process:
        """Start a process that holds `service`, with the plugins of this one. What the service raises when it is made is raised here.

        `service` is `"module:function"` of ours: `await function(**arguments)` gives the object whose public async methods can be called. It may have `connected(send)`, which is given
        `send(kind, value)` for messages, and `async close()`. The process ends when this one does, however that ends. `intarsia_rl.processes` has what a launcher needs besides starting.
        """
