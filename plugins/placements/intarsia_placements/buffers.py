"""Where the members of a bucket begin in a rank's buffer, in bytes. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from intarsia.contracts import ALIGNMENT_BYTES, Member, Region
from intarsia.errors import UsageError, did_you_mean
from intarsia.layout import DTYPE_BYTES, region_numel


@dataclasses.dataclass(frozen=True, slots=True)
class BufferPlan:
    """Where each member of a bucket begins in one rank's buffer. Stability: stable."""

    offsets_bytes: tuple[int, ...]
    total_bytes: int


def buffer_plan(members: Sequence[Member], regions: Sequence[Region]) -> BufferPlan:
    """The plan for one rank that stores `regions[m]` of `members[m]`: in order, each at a multiple of ALIGNMENT_BYTES, total rounded up to it.

    A member without a local element takes no room. Raises UsageError for a dtype of unknown size. Stability: stable.
    """
    offsets, position = [], 0
    for member, region in zip(members, regions, strict=True):
        if member.dtype not in DTYPE_BYTES:
            raise UsageError(f"Member {member.name!r} has the unknown dtype {member.dtype!r}. {did_you_mean(member.dtype, DTYPE_BYTES)}")
        offsets.append(position)
        used = region_numel(region) * DTYPE_BYTES[member.dtype]
        position += -(-used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return BufferPlan(tuple(offsets), position)
