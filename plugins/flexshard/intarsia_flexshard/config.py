"""Settings of FlexShard. Torch-free. `intarsia_flexshard.assign` says what the words mean together and checks them."""

from __future__ import annotations

import chz
from intarsia.config import Config, PlacementConfig, SharderConfig, TransportConfig
from intarsia_placements.config import Row


@chz.chz(typecheck=True)
class BucketConfig(Config):
    """Parameters that are gathered by one collective and reduced by one. A setting that is none is the sharder's."""

    name: str = chz.field(doc="What messages, traces and checkpoints' plans call the bucket.")
    match: tuple[str, ...] = chz.field(
        doc="Globs on the parameters' canonical names, where * also matches dots; a module's name takes everything below it."
    )
    placement: PlacementConfig | None = chz.field(default=None, doc="How the bucket is cut over `axes`.")
    axes: tuple[str, ...] | None = chz.field(
        default=None,
        doc="Mesh axes over whose ranks the bucket is cut, outermost first. None: dp_shard, cp and tp where they do not cut the parameter already; ep_shard for experts.",
    )
    replicas: tuple[str, ...] | None = chz.field(
        default=None,
        doc="Mesh axes along which every rank has the same shards: gradients are summed over them too. None: all that are left.",
    )
    compute: str | None = chz.field(default=None, doc="Dtype of the whole parameters in forward and backward. None: precision.compute.")
    reduce: str | None = chz.field(default=None, doc="Dtype of gradients on the wire. None: precision.reduce.")
    reshard: str | None = chz.field(default=None, doc="always, never, or after N; see the sharder's `reshard`.")
    offload: str | None = chz.field(
        default=None, doc="What waits in the host's memory: none; cpu: shards and optimizer state; low: the low halves of split masters."
    )
    reduce_op: str | None = chz.field(default=None, doc="sum or average, over shards and replicas.")
    divisor: float | None = chz.field(default=None, doc="What an average divides by instead of the number of ranks.")
    prefetch: int | None = chz.field(default=None, doc="How many buckets ahead gathers start.")
    payload: str | None = chz.field(default=None, doc="plain, or fp8: what is gathered.")


@chz.chz(typecheck=True)
class FlexShardConfig(SharderConfig):
    """Keeps parameters as shards in buckets: those of `buckets` first, then each declared block of the model is one, the rest another."""

    placement: PlacementConfig = chz.field(default_factory=Row, doc="How buckets are cut over the ranks of their axes.")
    buckets: tuple[BucketConfig, ...] = chz.field(default=(), doc="Buckets of your own; what none of them claims goes to the default ones.")
    reshard: str = chz.field(
        default="always",
        doc="When a block's whole parameters are given back: always (after its forward and after its backward), never (after the step), "
        "or `after N`: once N further buckets were unsharded.",
    )
    offload: str = chz.field(
        default="none", doc="What waits in the host's memory: none; cpu: shards and optimizer state; low: the low halves of split masters."
    )
    reduce_op: str = chz.field(
        default="sum", doc="sum or average of gradients over shards and replicas. The loss is divided by a global count, hence sum."
    )
    divisor: float | None = chz.field(default=None, doc="What an average divides by instead of the number of ranks.")
    prefetch: int = chz.field(default=1, doc="How many buckets ahead gathers start; 0: when they are needed.")
    payload: str = chz.field(default="plain", doc="What is gathered: plain (the compute dtype), or fp8 with scales.")
    tile: tuple[int, int] = chz.field(default=(128, 128), doc="fp8: the block of a matrix that shares a scale. No placement cuts it.")
    scales: str = chz.field(default="float32", doc="fp8: float32 or power_of_two.")
    gradients: str = chz.field(
        default="whole", doc="How gradients wait during accumulation: whole (no communication), or sharded (reduced every micro-batch)."
    )
    placed: bool = chz.field(
        default=True,
        doc="Let kernels that can (linear=placed, onednn) write weights' gradients where they are sent from, for placements that keep a parameter in one piece there, as flat and owned do.",
    )
    master: str = chz.field(
        default="float32",
        doc="float32: masters have precision.master; split: bfloat16 that is gathered as it is, and 16 more bits beside it.",
    )
    owners: str = chz.field(
        default="elements", doc="What balances owners: elements, or newton_schulz (the time of Muon's update of each matrix)."
    )
    transport: TransportConfig | None = chz.field(
        default=None, doc="What moves gathers instead of the process group, where the device has it."
    )
    debug: bool = chz.field(default=False, doc="Overwrite released parameters with NaN instead of freeing them, so that a late use shows.")
