"""The kinds that reinforcement learning adds. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import offer


@offer("generator", base="intarsia_rl.bases:GeneratorConfig")
def offer_generators() -> Sequence[Entry]:
    """Generators. Target: `build(config, context) -> Generator` (`intarsia_rl.contracts`), in a process of its own."""
    return ()


@offer("routing", base="intarsia_rl.bases:RoutingConfig")
def offer_routings() -> Sequence[Entry]:
    """Ways to share requests out over generators. Target: `build(config) -> Routing`, in a module that imports no torch."""
    return ()


@offer("weight transport", base="intarsia_rl.bases:WeightTransportConfig")
def offer_weight_transports() -> Sequence[Entry]:
    """Ways of weights from trainer to generators. Target: `build(config, directory) -> WeightTransport`, on every rank of the trainer."""
    return ()


@offer("renderer", base="intarsia_rl.bases:RendererConfig")
def offer_renderers() -> Sequence[Entry]:
    """Turns to tokens and back. Target: `build(config, tokenizer) -> Renderer`."""
    return ()


@offer("algorithm", base="intarsia_rl.bases:AlgorithmConfig")
def offer_algorithms() -> Sequence[Entry]:
    """Algorithms of the loss `policy`. Target: `build(config) -> Algorithm`, in a module that imports no torch."""
    return ()


@offer("process launcher", base="intarsia_rl.bases:ProcessLauncherConfig")
def offer_process_launchers() -> Sequence[Entry]:
    """What starts controllers, generators and environment workers. Target: `build(config) -> ProcessLauncher`, in a module that imports no torch."""
    return ()
