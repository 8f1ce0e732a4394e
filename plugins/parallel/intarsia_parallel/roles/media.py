"""media: a vision tower, `forward(patches_NC, grids) -> (features_MD, tuple of further features_MD)`, with whole parameters.

The ranks of cp and tp hold parts of the same rows, and each has all patches of their images. With `parallel.vision=whole` each runs the tower on all of them and uses the features of its
own tokens: nothing is communicated. With `shared` the frames (which do not see each other) are dealt out over these ranks by what they cost, each runs the tower on its own, and features
are gathered; backward, each frame's gradients are summed where it was run.

Gradients: partial sums along cp and tp. Of all images, what this rank's tokens say; or of this rank's images, what all tokens say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from intarsia.comm import Communicator
from intarsia.errors import PluginError, UsageError
from torch import Tensor, nn

from intarsia_parallel.collectives import gather
from intarsia_parallel.config import DeclaredConfig
from intarsia_parallel.roles.common import Groups, ParameterCuts, wrap

if TYPE_CHECKING:
    from intarsia.config import Recipe

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


class Media:
    """See the module. `frame_flops(rows, columns)` of the tower is what a frame costs; `config.merge` the side of the square of patches that makes one feature."""

    def __init__(self) -> None:
        self._is_shared = False

    def prepare(self, config: DeclaredConfig, recipe: Recipe) -> None:
        """Take the paralleliser's setting."""
        self._is_shared = config.vision == "shared"

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
        if self._is_shared and comm.size > 1:
            wrap(module, _shared, comm, name, module)


@torch.compiler.disable
def _shared(
    comm: Communicator, name: str, module: Any, forward: Callable[..., Any], patches_NC: Tensor, grids: Sequence[Sequence[int]]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    given = tuple((int(frames), int(rows), int(columns)) for frames, rows, columns in grids)
    frames = [(rows, columns) for count, rows, columns in given for _ in range(count)]
    patches = [rows * columns for rows, columns in frames]
    if patches_NC.shape[0] != sum(patches):
        raise PluginError(f"{name}: the batch has {patches_NC.shape[0]} patches, and its grids speak of {sum(patches)}.")
    costs = {frame: float(module.frame_flops(*frame)) for frame in set(frames)}
    shares = dealt(tuple(costs[frame] for frame in frames), comm.size)
    own = shares[comm.rank]
    mine_NC = torch.cat([patches_NC[:0], *(part for part in (patches_NC.split(patches)[i] for i in own))])
    features_MD, further = forward(mine_NC, together([frames[i] for i in own]))
    merged = module.config.merge**2
    counts = [sum(patches[i] // merged for i in share) for share in shares]
    # One gather for all of them: features of a patch lie side by side.
    every_MD = gather(torch.cat((features_MD, *further), -1), 0, counts, comm, f"{name}, features")
    every_MD = in_order(every_MD, shares, [count // merged for count in patches])
    widths = [features_MD.shape[1], *(each.shape[1] for each in further)]
    first_MD, *rest = every_MD.split(widths, 1)
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
