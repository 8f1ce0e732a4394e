"""Two plugins, so that each can be switched off alone: the kind "pipeline schedule" with the engine and the command, and the schedules. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl

INTARSIA_API = 1


@hookimpl
def add_hookspecs() -> Sequence[str]:
    """The module of the hook `offer_pipeline_schedules`."""
    return ["intarsia_pipeline.hookspecs"]


@hookimpl
def offer_engines() -> Sequence[Entry]:
    """The engine."""
    return [
        Entry(
            name="pipeline",
            config="intarsia_pipeline.config:PipelineConfig",
            target="intarsia_pipeline.engine:build",
            doc="Runs the model in stages over mesh.pp ranks, by any pipeline schedule.",
        )
    ]


@hookimpl
def offer_commands() -> Sequence[Entry]:
    """The command."""
    return [
        Entry(
            name="pipeline",
            target="intarsia_pipeline.show_command:command",
            doc="Show a pipeline schedule: who computes what when, its bubble, what it keeps alive.",
        )
    ]


class Schedules:
    """Offers the schedules."""

    INTARSIA_API = 1

    @hookimpl(optionalhook=True)
    def offer_pipeline_schedules(self) -> Sequence[Entry]:
        """All of them."""
        rows = (
            ("gpipe", "GPipeConfig", "plain:GPipe", "All forwards, then all backwards."),
            ("1f1b", "OneFOneBConfig", "plain:OneFOneB", "One forward, one backward: keeps few activations."),
            (
                "interleaved",
                "InterleavedConfig",
                "plain:Interleaved",
                "1F1B over several stages on each rank: a smaller bubble, more messages.",
            ),
            ("zb_h1", "ZBH1Config", "zero_bubble:ZBH1", "1F1B with weight gradients in its bubbles, in 1F1B's memory."),
            (
                "zbv",
                "ZBVConfig",
                "zero_bubble:ZBV",
                "Two stages on each rank in a V: no bubble where forward, input and weight gradients take equally long.",
            ),
            (
                "dualpipev",
                "DualPipeVConfig",
                "dualpipev:DualPipeV",
                "A V of two stages on each rank, forwards and backwards in overlapping pairs.",
            ),
        )
        return [
            Entry(name=name, config=f"intarsia_pipeline.config:{config}", target=f"intarsia_pipeline.schedules.{target}", doc=doc)
            for name, config, target, doc in rows
        ]


schedules = Schedules()
