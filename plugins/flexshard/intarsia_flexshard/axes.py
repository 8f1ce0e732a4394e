"""Over which mesh axes a parameter is cut by its bucket, and over which its gradient is summed besides. Torch-free and pure.

A gradient is a partial sum over every axis of data and sequence (dp_replicate, dp_shard, cp, tp) along which tensor parallelism has not cut the parameter; where expert
parallelism has cut it, over dp_replicate and ep_shard. Each of these axes cuts the parameter further or has replicas, and there is no third: what is on none of them would be
summed by nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from intarsia.errors import UsageError

# What a bucket may name. The last is folded out of the three before it, as the ranks of equal place in their expert-parallel groups.
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep_shard")
DENSE, EXPERT = AXES[:4], ("dp_replicate", "ep_shard")
# Named whatever their size, so that a bucket is called and cut alike on every mesh.
ALWAYS = ("dp_replicate", "dp_shard", "ep_shard")


class Span(NamedTuple):
    """Axes that cut, outermost first, and axes along which every rank has the same shards."""

    axes: tuple[str, ...]
    replicas: tuple[str, ...]


def span_of(bucket: str, axes: Sequence[str] | None, replicas: Sequence[str] | None, info: Any, sizes: Mapping[str, int]) -> Span:
    """The axes of one parameter: what the bucket says, and what it leaves open (None) decided. `info` has a name and may have `outer` cuts.

    Decided, a parameter is cut over all axes but dp_replicate along which it is not cut yet; along those where `outer` says "replicate" it stays whole. Raises
    UsageError for an axis along which it is cut already, and for one over which nobody would sum.
    """
    outer = {axis: placement == "replicate" for axis, size, placement in getattr(info, "outer", ()) if size > 1}
    cut, whole = ([axis for axis, stays in outer.items() if stays == wanted] for wanted in (False, True))
    given = [*(axes or ()), *(replicas or ())]
    is_folded = "ep" in cut or ("ep_shard" in given and sizes.get("ep", 1) == 1 and not cut)
    if "ep" in cut and len(cut) > 1:
        raise UsageError(
            f"Parameter {info.name!r} is cut over {' and '.join(cut)}. Expert parallelism is folded out of dp_shard, cp and tp: what it cuts, they cannot cut too. Cut "
            "experts over ep alone."
        )
    space = [axis for axis in (EXPERT if is_folded else DENSE) if axis not in cut]
    spanned = [axis for axis in space if sizes.get(axis, 1) > 1 or axis in ALWAYS]
    if axes is None:
        axes = [axis for axis in spanned if axis != "dp_replicate" and axis not in (*whole, *(replicas or ()))]
    if replicas is None:
        replicas = [axis for axis in spanned if axis not in axes]
    _check(bucket, info.name, [*axes, *replicas], cut, space, spanned, sizes)
    twice = [axis for axis in whole if axis in axes]
    if twice:
        raise UsageError(
            f"Bucket {bucket!r} cuts {info.name!r} over {twice[0]}, along which it is to stay whole. Leave `axes` out, or without {twice[0]}."
        )
    return Span(tuple(axes), tuple(replicas))


def _check(
    bucket: str,
    name: str,
    named: Sequence[str],
    cut: Sequence[str],
    space: Sequence[str],
    spanned: Sequence[str],
    sizes: Mapping[str, int],
) -> None:
    wrong = [axis for axis in named if axis not in space and sizes.get(axis, 1) > 1]
    advice = f"Leave `axes` and `replicas` out (then they are decided), or name {', '.join(spanned)} for it."
    if wrong:
        why = f"which is cut over {' and '.join(cut)} before" if cut else "which no expert parallelism cuts"
        raise UsageError(f"Bucket {bucket!r} names the axis {wrong[0]} ({sizes[wrong[0]]} ranks) for {name!r}, {why}. {advice}")
    missing = [axis for axis in spanned if axis not in named and sizes.get(axis, 1) > 1]
    if missing:
        raise UsageError(
            f"Bucket {bucket!r}: the gradient of {name!r} is a partial sum over {missing[0]} ({sizes[missing[0]]} ranks), which neither `axes` nor `replicas` names: nobody would sum "
            f"it. {advice}"
        )


def default_divisor(sizes: Mapping[str, int]) -> float | None:
    """What an average divides by where nobody says: the ranks that have other tokens than this one, if that is not the number of the bucket's ranks (None)."""
    if sizes.get("tp", 1) == sizes.get("ep", 1) == 1:
        return None
    return float(math.prod(sizes.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "cp")))
