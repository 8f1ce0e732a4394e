"""Which boxes a rank writes and which bytes it reads: integers only. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from intarsia.checkpoint.manifest import TensorRecord
from intarsia.contracts import Box, Piece, Region
from intarsia.errors import PluginError
from intarsia.layout import DTYPE_BYTES, Layout
from intarsia.mesh import AXES, coordinates, copies_along, full_sizes

# A read is cut into pieces of at most this, where the tensor's rows allow.
READ_BYTES = 64 << 20

# Unwanted bytes between two wanted rows are skipped when they are at least this many: a seek costs about as much.
SKIP_BYTES = 256 << 10


def layout_rank(layout: Layout, mesh: Mapping[str, int], rank: int, world: int, key: str) -> tuple[int, bool]:
    """This process's rank in `layout`, and whether it is the first of those that hold the same by axes that the layout does not know.

    `mesh` has the sizes of the mesh's axes (`intarsia.mesh`; those of size 1 may be left out). What a layout without the axis `pp` describes belongs to
    this rank's pipeline stage. A layout over as many ranks as there are processes needs no mesh. PluginError where the layout's axes are not the mesh's.
    """
    sizes = full_sizes(mesh)
    if math.prod(sizes[axis] for axis in AXES) != world or any(sizes.get(name) != size for name, size in layout.axes):
        if layout.ranks in (1, world):
            return rank % layout.ranks, layout.ranks == world or rank == 0
        raise PluginError(
            f"The state item {key!r} has a layout over the axes {dict(layout.axes)}, which are not axes of the mesh {dict(mesh)} of {world} processes."
        )
    places, index = coordinates(sizes, rank), 0
    for name, size in layout.axes:
        index = index * size + places[name]
    return index, not any(places[axis] for axis in copies_along(name for name, _ in layout.axes))


def first_of_stage(mesh: Mapping[str, int], rank: int, world: int) -> bool:
    """Whether this process writes what is equal on all ranks of its pipeline stage."""
    return rank % (world // mesh.get("pp", 1)) == 0


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """Bytes to read (`piece`, a part of a stored piece that is contiguous in its file) for the box `want`, which lies within."""

    piece: Piece
    want: Box


def plan_reads(record: TensorRecord, region: Region) -> Iterator[Read]:
    """What fills `region` of a stored tensor: every element of it once, no more bytes than rows and seeks make sensible."""
    for stored in record.pieces:
        outer = Box(stored.box_start, stored.box_size)
        for box in region:
            want = outer.intersect(box)
            if want is not None:
                yield from _runs(stored, outer, want, DTYPE_BYTES[record.dtype])


def _runs(stored: Piece, outer: Box, want: Box, item_bytes: int) -> Iterator[Read]:
    """Contiguous runs within `stored` (the box `outer`) that cover `want`."""
    # The run spans `want` in the first dimension where want has more than one index, and all of the piece in later ones.
    axis = next((d for d, n in enumerate(want.size) if n > 1), max(len(want.size) - 1, 0))
    start = (*want.start[: axis + 1], *outer.start[axis + 1 :])
    size = (*want.size[: axis + 1], *outer.size[axis + 1 :])
    run_bytes = math.prod(size) * item_bytes
    gap_bytes = (math.prod(size[axis + 1 :]) - math.prod(want.size[axis + 1 :])) * item_bytes
    if run_bytes > READ_BYTES or gap_bytes >= SKIP_BYTES:
        count = want.size[axis] if want.size else 1
        if count > 1:
            for first, n in ((0, count // 2), (count // 2, count - count // 2)):
                part_start = (*want.start[:axis], want.start[axis] + first, *want.start[axis + 1 :])
                part_size = (*want.size[:axis], n, *want.size[axis + 1 :])
                yield from _runs(stored, outer, Box(part_start, part_size), item_bytes)
            return
    offset = 0
    for a, b, n in zip(start, outer.start, outer.size, strict=True):
        offset = offset * n + a - b
    yield Read(Piece(stored.key, start, size, stored.file, stored.offset + offset * item_bytes, run_bytes), want)
