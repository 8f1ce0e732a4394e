"""Base classes of the configs of what this distribution declares. Torch-free. Stability: provisional."""

from __future__ import annotations

import chz
from intarsia.config.bases import Config


@chz.chz(typecheck=True)
class GeneratorConfig(Config):
    """Settings of a generator."""


@chz.chz(typecheck=True)
class RoutingConfig(Config):
    """Settings of a routing."""


@chz.chz(typecheck=True)
class WeightTransportConfig(Config):
    """Settings of a weight transport."""


@chz.chz(typecheck=True)
class RendererConfig(Config):
    """Settings of a renderer."""


@chz.chz(typecheck=True)
class AlgorithmConfig(Config):
    """Settings of an algorithm."""


@chz.chz(typecheck=True)
class ProcessLauncherConfig(Config):
    """Settings of a process launcher."""
