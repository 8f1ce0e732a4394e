"""The groups of ranks that buckets need. All ranks of a pipeline stage make them in the same order; none goes beyond the stage, since other stages have other buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from intarsia.comm import Communicator
from intarsia.mesh import Mesh

from intarsia_flexshard.assign import BucketSpec


class Groups(NamedTuple):
    """The groups of a bucket: of its shards, once for gathers and once for reductions so that neither queues behind the other, and of its replicas."""

    gather: Communicator
    reduce: Communicator
    replicas: Communicator


def make_groups(specs: Sequence[BucketSpec], mesh: Mesh, transport: Any) -> dict[tuple[tuple[str, ...], tuple[str, ...]], Groups]:
    """The groups for each combination of axes and replicas. `transport` moves gathers, where it is not None."""
    found: dict[Any, Groups] = {}
    gathers: dict[tuple[str, ...], tuple[Communicator, ...]] = {}
    for spec in specs:
        if spec.axes not in gathers:
            shards = mesh.comm(*spec.axes)
            alone = shards.size == 1
            gathers[spec.axes] = (shards, shards) if alone else tuple(shards.duplicate(name, transport) for name in ("gather", "reduce"))
        gather, reduce = gathers[spec.axes]
        if (spec.axes, spec.replicas) not in found:
            found[spec.axes, spec.replicas] = Groups(gather, reduce, mesh.comm(*spec.replicas))
    return found
