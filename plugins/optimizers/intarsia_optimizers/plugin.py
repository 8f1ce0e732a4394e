"""Entry points `adamw` and `muon`: two plugins of one distribution, so that each can be switched off alone. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.contracts import Entry
from intarsia.hookspecs import hookimpl


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


adamw = AdamWPlugin()
muon = MuonPlugin()
