"""Where two recipes differ."""

from __future__ import annotations

import dataclasses

from intarsia.config import Resolution, Resolved


@dataclasses.dataclass(frozen=True)
class Difference:
    """A path at which two recipes differ; None: the path is not there on that side. Stability: provisional."""

    path: str
    left: Resolution | None
    right: Resolution | None


def diff(left: Resolved, right: Resolved) -> list[Difference]:
    """Where two final recipes differ, in order of paths as they stand. Stability: provisional."""
    paths = dict.fromkeys([*left.values, *right.values])
    pairs = [Difference(path, left.values.get(path), right.values.get(path)) for path in paths]
    # By repr: it tells 1 from True and takes nan as equal to nan.
    return [pair for pair in pairs if not (pair.left and pair.right and repr(pair.left.value) == repr(pair.right.value))]
