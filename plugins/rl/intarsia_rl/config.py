"""Settings of a run that learns from rollouts: the loader `rollouts`. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config.bases import Config, EnvironmentConfig, LoaderConfig
from intarsia_data.bases import ProcessorConfig

from intarsia_rl.bases import GeneratorConfig, ProcessLauncherConfig, RendererConfig, RoutingConfig, WeightTransportConfig


@chz.chz(typecheck=True)
class SamplingConfig(Config):
    """How the policy's tokens are chosen in training. Temperature 1 with nothing left out is the policy itself; anything else is another one, which is said once."""

    temperature: float = chz.field(default=1.0, doc="Divisor of the logits; 0: the likeliest token.")
    top_k: int | None = chz.field(default=None, doc="Only the k likeliest tokens; none: all.")
    top_p: float = chz.field(default=1.0, doc="Only the likeliest tokens that together have this probability.")
    min_p: float = chz.field(default=0.0, doc="Only tokens at least this times as likely as the likeliest.")


@chz.chz(typecheck=True)
class HeldOutConfig(Config):
    """Greedy rollouts on held-out tasks."""

    every: int | None = chz.field(
        default=None,
        doc="Steps between evaluations; none: at the end only (where core's evaluation is: evaluation.every=0 leaves that one out); 0: never.",
    )
    at_start: bool = chz.field(default=True, doc="Evaluate before the first step as well.")
    split: str = chz.field(default="held_out", doc="The environment's split.")
    tasks: int = chz.field(default=64, doc="How many of its tasks, the first ones.")
    temperature: float = chz.field(default=0.0, doc="0: greedy.")


@chz.chz(typecheck=True)
class RolloutsConfig(LoaderConfig):
    """Batches of rollouts: tasks of an environment, tried by the policy that is being trained. A step trains on `groups` groups of `group` tries at one task, in as many rows as they
    need: `train.global_batch` has no say."""

    environment: EnvironmentConfig = chz.field(doc="The environment.")
    generator: GeneratorConfig = chz.field(doc="What generates.")
    generators: int = chz.field(default=1, doc="How many of them, each in a process of its own.")
    generator_threads: int | None = chz.field(default=1, doc="CPU threads of each; none: torch's own choice.")
    workers: int = chz.field(default=1, doc="Processes that run environments.")
    launcher: ProcessLauncherConfig = chz.field(doc="What starts these processes.")
    routing: RoutingConfig = chz.field(doc="Which generator gets a request.")
    renderer: RendererConfig = chz.field(doc="Turns to tokens and back.")
    processor: ProcessorConfig | None = chz.field(
        default=None, doc="What makes tokens and patches of an environment's images and video (patches); none: it shows none."
    )
    weights: WeightTransportConfig = chz.field(doc="How weights get to the generators.")
    sampling: SamplingConfig = chz.field(default_factory=SamplingConfig, doc="How tokens are chosen.")
    held_out: HeldOutConfig = chz.field(default_factory=HeldOutConfig, doc="Evaluation.")
    split: str = chz.field(default="train", doc="The environment's split to learn from.")
    group: int = chz.field(default=8, doc="Tries at one task.")
    groups: int = chz.field(default=8, doc="Groups in one step.")
    max_lag: int = chz.field(
        default=1,
        doc="Most optimizer steps between a sample's oldest token and the step that trains on it; 0: generation and training take turns.",
    )
    in_flight: str = chz.field(
        default="continue",
        doc="What requests do when weights change: continue with the new ones, or drain (finish with the old ones first).",
    )
    uses: int = chz.field(default=1, doc="How many steps train on a group, within max_lag.")
    attempts: int = chz.field(default=3, doc="Tries of a sample whose environment fails in a way that may pass, or whose process dies.")
    timeout_s: float = chz.field(default=600.0, doc="Longest wait for one answer of an environment or a generator.")
    barren_rounds: int = chz.field(default=8, doc="Rounds in a row with no group to train on after which the run stops and says why.")
    replay_routes: bool = chz.field(default=False, doc="Train mixtures of experts with the experts that the generator chose.")
    invariant: bool = chz.field(
        default=False, doc="Batch-invariant mode: trainer and generator give equal log-probabilities, bit for bit, which every step shows."
    )
    audit: int = chz.field(
        default=1,
        doc="Samples of each step that a generator scores anew with the trainer's weights, where none of their tokens is of this version; 0: none.",
    )
    keep_rollouts: bool = chz.field(default=True, doc="Write every sample into rollouts/.")
