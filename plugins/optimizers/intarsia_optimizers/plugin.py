"""Entry points: one plugin for each optimizer, one for the schedules and one for the kernels' hook, so that each can be switched off alone. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl


class RulesPlugin:
    """Declares the hook by which kernels replace update rules."""

    INTARSIA_API = 1

    @hookimpl
    def add_hookspecs(self) -> Sequence[str]:
        """The module of the hook."""
        return ["intarsia_optimizers.hookspecs"]


class AdamWPlugin:
    """Offers `adamw`."""

    INTARSIA_API = 1

    @hookimpl
    def offer_optimizers(self) -> Sequence[Entry]:
        """The entry."""
        return [
            Entry(
                name="adamw",
                target="intarsia_optimizers.adamw:build",
                config="intarsia_optimizers.config:AdamWConfig",
                doc="AdamW, fused where torch has it.",
            )
        ]


class AdamPlugin:
    """Offers `adam`."""

    INTARSIA_API = 1

    @hookimpl
    def offer_optimizers(self) -> Sequence[Entry]:
        """The entry."""
        return [
            Entry(
                name="adam",
                target="intarsia_optimizers.adamw:build",
                config="intarsia_optimizers.config:AdamConfig",
                doc="Adam, fused where torch has it; decay decoupled or by the penalty's gradient.",
            )
        ]


class LionPlugin:
    """Offers `lion`."""

    INTARSIA_API = 1

    @hookimpl
    def offer_optimizers(self) -> Sequence[Entry]:
        """The entry."""
        return [
            Entry(
                name="lion",
                target="intarsia_optimizers.lion:build",
                config="intarsia_optimizers.config:LionConfig",
                doc="Lion: the sign of an interpolated momentum, half of Adam's state.",
            )
        ]


class SGDPlugin:
    """Offers `sgd`."""

    INTARSIA_API = 1

    @hookimpl
    def offer_optimizers(self) -> Sequence[Entry]:
        """The entry."""
        return [
            Entry(
                name="sgd",
                target="intarsia_optimizers.sgd:build",
                config="intarsia_optimizers.config:SGDConfig",
                doc="Stochastic gradient descent, with momentum or without.",
            )
        ]


class MuonPlugin:
    """Offers `muon`."""

    INTARSIA_API = 1

    @hookimpl
    def offer_optimizers(self) -> Sequence[Entry]:
        """The entry."""
        return [
            Entry(
                name="muon",
                target="intarsia_optimizers.muon:build",
                config="intarsia_optimizers.config:MuonConfig",
                doc="Muon for matrices, AdamW for the rest, as one optimizer.",
            )
        ]


class SchedulesPlugin:
    """Offers the learning-rate schedules."""

    INTARSIA_API = 1

    @hookimpl
    def offer_schedules(self) -> Sequence[Entry]:
        """The entries."""
        home, configs = "intarsia_optimizers.schedules", "intarsia_optimizers.config"
        return [
            Entry(name="constant", config=f"{configs}:ConstantConfig", target=f"{home}:build_constant", doc="Warm-up, then constant."),
            Entry(
                name="linear", config=f"{configs}:LinearConfig", target=f"{home}:build_linear", doc="Warm-up, then a straight line down."
            ),
            Entry(name="cosine", config=f"{configs}:CosineConfig", target=f"{home}:build_cosine", doc="Warm-up, then half a cosine down."),
            Entry(name="sqrt", config=f"{configs}:SqrtConfig", target=f"{home}:build_sqrt", doc="Warm-up, then the inverse square root."),
            Entry(name="wsd", config=f"{configs}:WSDConfig", target=f"{home}:build_wsd", doc="Warm-up, stable, decay."),
        ]


adam = AdamPlugin()
adamw = AdamWPlugin()
lion = LionPlugin()
muon = MuonPlugin()
rules = RulesPlugin()
schedules = SchedulesPlugin()
sgd = SGDPlugin()
