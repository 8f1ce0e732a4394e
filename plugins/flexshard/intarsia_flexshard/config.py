"""Settings of FlexShard. Torch-free."""

from __future__ import annotations

import chz
from intarsia.config import PlacementConfig, SharderConfig
from intarsia_placements.config import Row


@chz.chz(typecheck=True)
class FlexShardConfig(SharderConfig):
    """Keeps parameters as shards over mesh.dp_shard; each declared block of the model is one bucket, the rest another."""

    placement: PlacementConfig = chz.field(default_factory=Row, doc="How buckets are cut over the ranks of mesh.dp_shard.")
    reshard: str = chz.field(
        default="always",
        doc="always: a block's whole parameters are released after its forward and again after its backward; never: after the step.",
    )
    debug: bool = chz.field(default=False, doc="Overwrite released parameters with NaN instead of freeing them, so that a late use shows.")
