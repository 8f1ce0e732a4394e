"""media: a vision tower, `forward(patches_NC, grids) -> (features_MD, tuple of further features_MD)`, with whole parameters.

The ranks of cp and tp hold parts of the same rows, and each has all patches of their images. With `parallel.vision=whole` each runs the tower on all of them and uses the features of its
own tokens: nothing is communicated. With `shared` the frames (which do not see each other) are dealt out over these ranks by what they cost, each runs the tower on its own, and features
are gathered; backward, each frame's gradients are summed where it was run. With `balanced` the frames of all data-parallel ranks are dealt out like that over all ranks of the pipeline stage:
the tower has a data-parallel group of its own, and no rank waits for the one with the most images. Patches go to where a frame is run, features to the ranks that hold its row, and each micro-batch
begins with all ranks' sizes of images.

Gradients: partial sums along cp and tp. Of all images, what this rank's tokens say; or of this rank's images, what all tokens say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from intarsia.comm import Communicator
from intarsia.errors import PluginError, UsageError
from intarsia.train.built import DATA_AXES
from torch import Tensor, nn

from intarsia_parallel.collectives import exchange, exchanged, gather
from intarsia_parallel.config import DeclaredConfig
from intarsia_parallel.roles.common import Groups, ParameterCuts, wrap

if TYPE_CHECKING:
    from intarsia.config import Recipe

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


class Media:
    """See the module. `frame_flops(rows, columns)` of the tower is what a frame costs; `config.merge` the side of the square of patches that makes one feature."""

    def __init__(self) -> None:
        self._vision = "whole"

    def prepare(self, config: DeclaredConfig, recipe: Recipe) -> None:
        """Take the paralleliser's setting."""
        self._vision = config.vision

    def check(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> None:
        """It can be asked what a frame costs and how many patches make a feature."""
        merge = getattr(getattr(module, "config", None), "merge", None)
        if not callable(getattr(module, "frame_flops", None)) or not isinstance(merge, int) or merge < 1:
            raise UsageError(
                f"{name} has the role media, which is for vision towers: {type(module).__name__} needs a method `frame_flops(rows, columns)` and `config.merge`."
            )

    def cut(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> ParameterCuts:
        """Nothing."""
        return {}

    def apply(self, name: str, module: nn.Module, groups: Groups) -> None:
        """Deal frames out and gather features, where they are shared."""
        comm = groups("cp", "tp")
        if self._vision == "balanced" and (stage := groups(*DATA_AXES, "cp", "tp")).size > 1:
            wrap(module, _balanced, stage, comm.size, name, module)
        elif self._vision == "shared" and comm.size > 1:
            wrap(module, _shared, comm, name, module)


@torch.compiler.disable
def _shared(
    comm: Communicator, name: str, module: Any, forward: Callable[..., Any], patches_NC: Tensor, grids: Sequence[Sequence[int]]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    frames, patches = _frames(name, patches_NC, grids)
    shares = _dealt_by_cost(module, frames, comm.size)
    own = shares[comm.rank]
    parts = patches_NC.split(patches)
    mine_NC = torch.cat([patches_NC[:0], *(parts[i] for i in own)])
    features_MD, widths = _run(forward, mine_NC, [frames[i] for i in own])
    merged = [count // module.config.merge**2 for count in patches]
    counts = [sum(merged[i] for i in share) for share in shares]
    return _parted(in_order(gather(features_MD, 0, counts, comm, f"{name}, features"), shares, merged), widths)


@torch.compiler.disable
def _balanced(
    comm: Communicator, inner: int, name: str, module: Any, forward: Callable[..., Any], patches_NC: Tensor, grids: Sequence[Sequence[int]]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`comm` are all ranks of the stage, of which `inner` after another hold parts of the same rows and have the same patches: the first of them gives them away."""
    own, own_patches = _frames(name, patches_NC, grids)
    group = comm.rank // inner
    every = [[tuple(frame) for frame in frames] for frames in comm.gather_json(own, f"{name}, sizes of frames")[::inner]]
    frames = [frame for each in every for frame in each]
    owners = [number for number, each in enumerate(every) for _ in each]
    patches = [rows * columns for rows, columns in frames]
    merged = [count // module.config.merge**2 for count in patches]
    shares = _dealt_by_cost(module, frames, comm.size)
    first = sum(len(each) for each in every[:group])

    def of(share: Sequence[int], owner: int) -> list[int]:
        return [i for i in share if owners[i] == owner]

    # Patches: from the first rank of a row's ranks to the rank that runs a frame.
    mine, is_giver = shares[comm.rank], comm.rank % inner == 0
    given = [of(share, group) if is_giver else [] for share in shares]
    parts = patches_NC.split(own_patches)
    sent_NC = torch.cat([patches_NC[:0], *(parts[i - first] for each in given for i in each)])
    sends = [sum(patches[i] for i in each) for each in given]
    receives = [sum(patches[i] for i in of(mine, rank // inner)) if rank % inner == 0 else 0 for rank in range(comm.size)]
    mine_NC = exchanged(sent_NC, sends, receives, comm, f"{name}, patches")
    features_MD, widths = _run(forward, mine_NC, [frames[i] for i in mine])
    # Features: from there to all ranks that hold parts of the frame's row. Frames of one row's ranks lie together.
    counts = [sum(merged[i] for i in of(mine, owner)) for owner in range(len(every))]
    sent_MD = torch.cat([part for part in features_MD.split(counts) for _ in range(inner)])
    found = [of(share, group) for share in shares]
    sends, receives = [count for count in counts for _ in range(inner)], [sum(merged[i] for i in each) for each in found]
    every_MD = exchange(sent_MD, sends, receives, comm, f"{name}, features")
    order = [[i - first for i in each] for each in found]
    return _parted(in_order(every_MD, order, merged[first : first + len(own)]), widths)


def _frames(name: str, patches_NC: Tensor, grids: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int]], list[int]]:
    """Rows and columns of every frame, and how many patches it has. PluginError unless these are all."""
    frames = [(int(rows), int(columns)) for count, rows, columns in grids for _ in range(int(count))]
    patches = [rows * columns for rows, columns in frames]
    if patches_NC.shape[0] != sum(patches):
        raise PluginError(f"{name}: the batch has {patches_NC.shape[0]} patches, and its grids speak of {sum(patches)}.")
    return frames, patches


def _dealt_by_cost(module: Any, frames: Sequence[tuple[int, int]], ranks: int) -> tuple[tuple[int, ...], ...]:
    costs = {frame: float(module.frame_flops(*frame)) for frame in set(frames)}
    return dealt(tuple(costs[frame] for frame in frames), ranks)


def _run(forward: Callable[..., Any], patches_NC: Tensor, frames: Sequence[tuple[int, int]]) -> tuple[Tensor, list[int]]:
    """The tower's features, all of a patch side by side, so that they travel together; and how wide each is."""
    features_MD, further = forward(patches_NC, together(frames))
    return torch.cat((features_MD, *further), -1), [features_MD.shape[1], *(each.shape[1] for each in further)]


def _parted(every_MD: Tensor, widths: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    first_MD, *rest = every_MD.split(list(widths), 1)
    return first_MD, tuple(rest)


@functools.lru_cache(maxsize=64)
def dealt(costs: tuple[float, ...], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Things by rank, in rising order: the dearest first, each to the rank with the least so far (of equal ones the first). A rank may get none."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for thing in sorted(range(len(costs)), key=lambda thing: -costs[thing]):
        rank = min(range(ranks), key=loads.__getitem__)
        shares[rank].append(thing)
        loads[rank] += costs[thing]
    return tuple(tuple(sorted(share)) for share in shares)


def together(frames: Sequence[tuple[int, int]]) -> tuple[Grid, ...]:
    """Frames (rows, columns) as grids: neighbours of one size are one."""
    grids: list[Grid] = []
    for rows, columns in frames:
        before = grids[-1] if grids else (0, 0, 0)
        if before[1:] == (rows, columns):
            grids[-1] = (before[0] + 1, rows, columns)
        else:
            grids.append((1, rows, columns))
    return tuple(grids)


def in_order(x_MD: Tensor, shares: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
    """Rows that stand rank after rank, brought into the order of things: `counts` are each thing's rows."""
    order = [thing for share in shares for thing in share]
    if order == sorted(order):
        return x_MD
    parts = dict(zip(order, x_MD.split([counts[thing] for thing in order]), strict=True))
    return torch.cat([parts[thing] for thing in range(len(counts))])
