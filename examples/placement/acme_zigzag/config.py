"""The placement's settings. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import PlacementConfig


@chz.chz(typecheck=True)
class ZigzagConfig(PlacementConfig):
    """Row blocks from either end."""

    blocks: int = chz.field(default=2, doc="Row blocks of each rank.")

    @chz.validate
    def _some(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"zigzag.blocks is {self.blocks}; each rank gets at least 1 block of rows.")
