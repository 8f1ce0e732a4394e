"""The one truth about every parameter of a run: name, shape, dtypes, initial value, ties, and where it lies.

A parameter has one canonical name (the first of its tie); layouts, optimizer state and checkpoints go by it. Initial values are drawn for fixed chunks of
`CHUNK` elements of the canonical flat tensor, each from its own generator seeded by a hash of seed, name and chunk: every mesh starts from the
same bits, on every device, and draws only what it holds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from intarsia.contracts import Box, Init, Region, Regions
from intarsia.errors import PluginError, UsageError, did_you_mean
from intarsia.layout import DTYPE_BYTES, range_boxes, region_numel, region_parts, slices, whole_region
from intarsia.mesh import copies_along

if TYPE_CHECKING:
    from intarsia.comm import Communicator
    from intarsia.contracts import Placement, ShardedModel
    from intarsia.layout import Layout
    from intarsia.mesh import Mesh

# Elements that are drawn from one generator. Part of what a seed means: never changed.
CHUNK = 2**20
# Elements that torch computes on one thread: others draw other chunks meanwhile.
PIECE = 2**15


@dataclasses.dataclass
class ParameterInfo:
    """One parameter. Stability: provisional.

    `shape` is the whole tensor's, `dtype` the master's. `aliases` are the other names of a tie. `block` is the declared block that it belongs to ("" for the
    root: outside of all blocks, or shared by several). `group` (optimizer), `bucket` and `layout` are written by the stages that decide them.

    `outer` are cuts made before data parallelism, (mesh axis, size, placement or "replicate") each, outermost first: by tensor and expert parallelism. The
    model's own parameter then has the shape of the local piece. `low` is the low half of a split master (`split_master`), int16, of the local parameter's
    shape; the local parameter is the bfloat16 high half then.

    `absent` are those names of a tie that other pipeline stages have. `is_copy`: another stage has the canonical one, so that norms, counts and saves skip this
    one and loading fills it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    init: Init
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    block: str = ""
    group: str = ""
    bucket: str = ""
    layout: Layout | None = None
    outer: tuple[tuple[str, int, Placement | Literal["replicate"]], ...] = ()
    low: Tensor | None = None
    absent: tuple[str, ...] = ()
    is_copy: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Every name under which the model of this process has it."""
        return tuple(name for name in (self.name, *self.aliases) if name not in self.absent)


class ParameterTable(Mapping[str, ParameterInfo]):
    """All parameters by canonical name, in the model's order; an alias finds its canonical parameter too. Stability: provisional.

    `dtype`, `compute` and `reduce` are torch dtype names as in the recipe's precision section; `seed` is the run's. `mesh` is set by the sharder. `total` has
    the numbers of elements of the whole model, `parameters` and `trainable_parameters`, also where this process keeps a pipeline stage only.
    """

    def __init__(self, dtype: str = "float32", compute: str | None = None, reduce: str | None = None, seed: int = 0) -> None:
        self.dtype, self.compute, self.reduce, self.seed = dtype, compute or dtype, reduce or dtype, seed
        for name in (self.dtype, self.compute, self.reduce):
            if name not in DTYPE_BYTES or not getattr(torch, name).is_floating_point:
                floating = [known for known in DTYPE_BYTES if getattr(torch, known).is_floating_point]
                raise UsageError(f"precision: {name!r} is not a floating-point dtype. {did_you_mean(name, floating)}")
        self.mesh: Mesh | None = None
        self.total = {"parameters": 0, "trainable_parameters": 0}
        self._infos: dict[str, ParameterInfo] = {}
        self._canonical: dict[str, str] = {}

    @classmethod
    def from_model(
        cls, model: nn.Module, dtype: str = "float32", compute: str | None = None, reduce: str | None = None, seed: int = 0
    ) -> ParameterTable:
        """Read a model (an `intarsia.contracts.Model`), on the meta device or not. A parameter with `requires_grad` False is frozen.

        Raises PluginError for parameters without an initial value, for ties that are declared and not there, and for ties that are there and not declared.
        """
        table = cls(dtype, compute, reduce, seed)
        regions, inits = model.regions(), model.inits()  # type: ignore[operator]
        named = dict(model.named_parameters(remove_duplicate=False))
        _check_ties(type(model).__name__, named, regions)
        aliases = {alias: group[0] for group in regions.ties for alias in group[1:]}
        missing = [name for name in named if name not in aliases and name not in inits]
        if missing:
            raise PluginError(
                f"{type(model).__name__}.inits() says nothing of {', '.join(missing[:5])}: every parameter needs its initial value."
            )
        for name, parameter in named.items():
            if name not in aliases:
                table.add(ParameterInfo(name, tuple(parameter.shape), dtype, inits[name], parameter.requires_grad))
        for group in regions.ties:
            table.tie(*group)
        modules = dict(model.named_modules(remove_duplicate=False))
        for block in regions.blocks:
            if block not in modules:
                raise PluginError(f"{type(model).__name__}.regions() declares the block {block!r}. {did_you_mean(block, modules)}")
            inner = [other for other in regions.blocks if other.startswith(f"{block}.")]
            if inner:
                raise PluginError(
                    f"{type(model).__name__}.regions(): block {inner[0]!r} lies inside block {block!r}; blocks must be disjoint."
                )
        for info in table.values():
            places = {_block_of(name, regions.blocks) for name in (info.name, *info.aliases)}
            info.block = places.pop() if len(places) == 1 else ""
        sizes = [(math.prod(info.shape), info.trainable) for info in table.values()]
        table.total = {"parameters": sum(n for n, _ in sizes), "trainable_parameters": sum(n for n, trainable in sizes if trainable)}
        return table

    def keep(self, names: Iterable[str]) -> None:
        """Forget every parameter of which none of `names` (canonical or not) is a name: a pipeline stage's table has its own part only."""
        kept = set(names)
        for name, info in list(self._infos.items()):
            info.absent = tuple(each for each in (name, *info.aliases) if each not in kept)
            info.is_copy = name in info.absent
            if not info.names:
                del self._infos[name]
        self._canonical = {name: canonical for name, canonical in self._canonical.items() if canonical in self._infos}

    def add(self, info: ParameterInfo) -> None:
        """Enter a parameter. Raises PluginError where the name is taken."""
        if info.name in self._canonical:
            raise PluginError(f"There is a parameter {info.name!r} already.")
        self._infos[info.name] = info
        self._canonical[info.name] = info.name

    def tie(self, canonical: str, *aliases: str) -> None:
        """Declare that `aliases` are further names of `canonical`."""
        info = self[canonical]
        for alias in aliases:
            if alias in self._canonical:
                raise PluginError(f"{alias!r} cannot become another name of {canonical!r}: it is a parameter, or tied, already.")
            self._canonical[alias] = info.name
            info.aliases += (alias,)

    def __getitem__(self, name: str) -> ParameterInfo:
        if name not in self._canonical:
            raise UsageError(f"The model has no parameter {name!r}. {did_you_mean(name, self._canonical)}")
        return self._infos[self._canonical[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._canonical

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def names(self) -> list[str]:
        """Canonical names, in the model's order."""
        return list(self._infos)

    # ------------------------------------------------------------ initial values

    def fill(self, name: str, region: Region, out: Tensor, seed: int | None = None) -> None:
        """Write the initial values of `region` into `out`: contiguous, its elements in storage order, on any device, of any floating dtype.

        `seed` is the table's where None. Drawn in float32, then cast.
        """
        info = self[name]
        fill_region(info.name, info.shape, info.init, region, out, self.seed if seed is None else seed)

    # ------------------------------------------------------------ numbers over all ranks

    def rank_in(self, layout: Layout) -> int:
        """This process's rank in `layout`, from its coordinates in the mesh."""
        rank = 0
        for axis, size in layout.axes:
            coordinate = self.mesh.coordinates.get(axis) if self.mesh is not None else 0 if size == 1 else None
            if coordinate is None:
                raise PluginError(f"A layout has the axis {axis!r} of size {size}, but the mesh has no such axis.")
            rank = rank * size + coordinate
        return rank

    def norm(
        self, tensors: Mapping[str, Tensor], comm: Communicator, p: float = 2.0, layouts: Mapping[str, Layout] | None = None
    ) -> Tensor:
        """The p-norm (p may be inf) of all parameters' tensors together as one vector; a 0-d float32 tensor, equal on all ranks.

        `tensors` are this rank's local parts by parameter name (gradients, say), laid out like the parameters or as `layouts` say; `comm` spans the whole
        mesh. Each element counts once: primaries only, and no copies. A pending reduction is carried out (on a copy) before the norm. One all-reduce else. A NaN anywhere
        gives a result that is not finite.
        """
        mine: list[Tensor] = []
        for name in sorted(tensors):
            layout = (layouts or {}).get(name, self[name].layout)
            if layout is None:
                raise PluginError(f"Parameter {name!r} has no layout yet: the sharder has not run.")
            mine += [] if self[name].is_copy else self._primary_parts(tensors[name].detach(), layout)
        mine = [part if part.dtype in (torch.float32, torch.float64) else part.float() for part in mine if part.numel()]
        if p == math.inf:
            local = torch.nn.utils.get_total_norm(mine, p) if mine else torch.zeros((), device=comm.device)
            # A maximum over ranks may drop a NaN; infinity it keeps.
            return comm.all_reduce(torch.nan_to_num(local.float(), nan=math.inf, posinf=math.inf), "max", "gradient norm")
        local = torch.nn.utils.get_total_norm(mine, p).double() ** p if mine else torch.zeros((), dtype=torch.float64, device=comm.device)
        return (comm.all_reduce(local, "sum", "gradient norm") ** (1 / p)).float()

    def _primary_parts(self, tensor: Tensor, layout: Layout) -> list[Tensor]:
        if layout.pending and self.mesh is not None:
            tensor = tensor.clone()
            for axis, op in layout.pending:
                self.mesh.comm(axis).all_reduce(tensor, "max" if op == "max" else "sum", "pending reduction")
        rank = self.rank_in(layout)
        local, primary = layout.local(rank), layout.primary(rank)
        if tensor.numel() != region_numel(local):
            raise PluginError(f"A local tensor has {tensor.numel()} elements, its layout {region_numel(local)}.")
        if self.mesh is not None and any(self.mesh.coordinates[axis] for axis in copies_along(axis for axis, _ in layout.axes)):
            return []
        if primary == local:
            return [tensor]
        flat = tensor.reshape(-1)
        return [view for box in primary for _, view in region_parts(flat, local, box)]

    # ------------------------------------------------------------ the framework's check after the build

    def check(self, model: nn.Module, groups: Mapping[str, str], sharded: ShardedModel) -> None:
        """Raise PluginError unless what is frozen stays frozen, ties stay tied, no parameter was lost, and every one is in exactly one bucket and,
        if it trains, in an optimizer group. `groups` maps canonical names to group names ("" for none)."""
        problems: list[str] = []
        named = dict(model.named_parameters(remove_duplicate=False))
        local = sharded.parameters()
        problems += [f"{name} is not in the model any more" for info in self.values() for name in info.names if name not in named]
        problems += [f"{name} is in the model, but not in the parameter table" for name in named if name not in self._canonical]
        problems += [f"{name} has no local part in the sharded model" for name in self if name not in local]
        problems += [f"{name} is kept by the sharder, but is not a canonical name" for name in local if name not in self._infos]
        for name, info in self._infos.items():
            here = info.names
            problems += [f"{alias} is no longer tied to {here[0]}" for alias in here if not _same(named.get(alias), named.get(here[0]))]
            if name in local and local[name].requires_grad != info.trainable:
                problems.append(
                    f"{name} is {'frozen' if info.trainable else 'trained'}, but was declared {'trained' if info.trainable else 'frozen'}"
                )
            group = groups.get(name, "")
            if bool(group) != info.trainable:
                problems.append(
                    f"{name} is in no optimizer group" if info.trainable else f"{name} is frozen, but in the optimizer group {group!r}"
                )
            problems += [f"{name} is in no bucket"] if not info.bucket else []
            problems += [f"{name} has no layout"] if info.layout is None else []
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise PluginError(f"The build of {type(model).__name__} by {type(sharded).__name__} is not sound: {shown}.")


def fill_region(name: str, shape: Sequence[int], init: Init, region: Region, out: Tensor, seed: int) -> None:
    """Write the initial values of `region` of a tensor into `out`; see `ParameterTable.fill`. A function of the arguments alone. Stability: provisional."""
    if out.numel() != region_numel(region) or not out.is_contiguous():
        raise PluginError(
            f"{name}: {tuple(out.shape)} cannot take the {region_numel(region)} elements of its region; it must be contiguous."
        )
    flat = out.detach().view(-1)
    if init.kind != "normal":
        flat.fill_({"zeros": 0.0, "ones": 1.0}.get(init.kind, init.value))
        return
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    wanted: dict[int, list[tuple[Box, int]]] = {}
    offset = 0
    for box in region:
        first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
        last = sum((end - 1) * stride for end, stride in zip(box.end, strides, strict=True))
        for chunk in range(first // CHUNK, last // CHUNK + 1):
            wanted.setdefault(chunk, []).append((box, offset))
        offset += box.numel
    whole, numel = Box.whole(shape), math.prod(shape)
    lengths = {chunk: min(CHUNK, numel - chunk * CHUNK) for chunk in sorted(wanted)}
    drawn = _in_threads(lambda chunk: _draw(f"{seed}/{name}/{chunk}", lengths[chunk], init), list(lengths))
    for (chunk, length), values in zip(lengths.items(), drawn, strict=True):
        boxes, position = wanted[chunk], 0
        for piece in range_boxes(whole, chunk * CHUNK, length):
            source = values[position : position + piece.numel].view(piece.size)
            position += piece.numel
            for box, begin in boxes:
                common = box.intersect(piece)
                if common is not None:
                    target = flat[begin : begin + box.numel].view(box.size)
                    target[slices(common, box.start)].copy_(source[slices(common, piece.start)])


@torch.no_grad()
def split_master(values: Tensor, high: Tensor, low: Tensor) -> None:
    """Write float32 `values` as two halves: `high` (bfloat16) is them rounded to nearest even, `low` (int16) what is missing in units of their last place.

    `join_master` gives the same bits back, with two exceptions. Exactly half-way above an even `high` the value moves one unit towards it, since its
    distance does not fit into int16 and `high` must be what an ordinary cast gives. A NaN stays one, of other bits. All of one shape. Stability: provisional.
    """
    high.copy_(values)
    missing = values.view(torch.int32) - high.view(torch.int16).int() * 2**16
    low.copy_(missing.clamp_(-(2**15), 2**15 - 1))


@torch.no_grad()
def join_master(high: Tensor, low: Tensor) -> Tensor:
    """The float32 values of a split master, a new tensor. Stability: provisional."""
    return (high.view(torch.int16).int() * 2**16 + low).view(torch.float32)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that checkpoints and weights hold, by name. Stability: provisional."""
    skipped = {
        f"{prefix}.{name}" if prefix else name for prefix, module in model.named_modules() for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in skipped}


def materialise_buffers(model: nn.Module, device: torch.device, seed: int) -> None:
    """Put every buffer of `model` on `device`: those on the meta device are drawn (by `model.inits()`) or, if not persistent, recomputed by the
    model's `fill_buffers`. Raises PluginError for a persistent buffer on the meta device that has no initial value. Stability: provisional."""
    inits: Mapping[str, Init] = model.inits() if hasattr(model, "inits") else {}  # type: ignore[operator]
    for prefix, module in model.named_modules():
        for key, buffer in list(module._buffers.items()):
            name = f"{prefix}.{key}" if prefix else key
            if buffer is None:
                continue
            if not buffer.is_meta:
                module._buffers[key] = buffer.to(device)
                continue
            # Not zeros_like: of a meta tensor it imports torch's symbolic shapes and sympy, a second at every start.
            module._buffers[key] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
            if name in inits:
                fill_region(name, buffer.shape, inits[name], whole_region(buffer.shape), module._buffers[key], seed)
            elif key not in module._non_persistent_buffers_set:
                raise PluginError(
                    f"The persistent buffer {name!r} is on the meta device, and {type(model).__name__}.inits() says nothing of it."
                )
    if hasattr(model, "fill_buffers"):
        model.fill_buffers()  # type: ignore[operator]


def _draw(text: str, length: int, init: Init) -> Tensor:
    """`length` float32 values of a normal distribution cut at `init.cut` standard deviations, on the CPU, from the seed that `text` hashes to."""
    generator = torch.Generator("cpu")
    generator.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1)
    bound = math.erf(init.cut / math.sqrt(2))
    uniform = torch.empty(length, dtype=torch.float32, device="cpu").uniform_(-bound, bound, generator=generator)
    for piece in uniform.split(PIECE):
        piece.erfinv_().mul_(init.std * math.sqrt(2)).clamp_(-init.cut * init.std, init.cut * init.std)
    return uniform


def _in_threads(draw: Callable[[int], Tensor], chunks: Sequence[int]) -> Iterator[Tensor]:
    """`draw` of each chunk, in order, on as many threads as torch computes with; at most twice as many are held at once."""
    threads = min(torch.get_num_threads(), len(chunks))
    if threads < 2:
        yield from map(draw, chunks)
        return
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(chunks), 2 * threads):
            yield from pool.map(draw, chunks[start : start + 2 * threads])


def _block_of(name: str, blocks: Sequence[str]) -> str:
    return next((block for block in blocks if name.startswith(f"{block}.")), "")


def _same(first: Any, second: Any) -> bool:
    """Whether two tensors are one: the same object, or the same part of the same storage."""
    if first is None or second is None:
        return False
    place = [(each.untyped_storage()._cdata, each.storage_offset(), each.shape, each.stride()) for each in (first, second)]
    return first is second or place[0] == place[1]


def _check_ties(owner: str, named: Mapping[str, Tensor], regions: Regions) -> None:
    tied: set[str] = set()
    for group in regions.ties:
        unknown = [name for name in group if name not in named]
        if unknown:
            raise PluginError(f"{owner}.regions() ties {unknown[0]!r}, which is no parameter. {did_you_mean(unknown[0], named)}")
        apart = [name for name in group if not _same(named[name], named[group[0]])]
        if apart or tied & set(group):
            raise PluginError(
                f"{owner}.regions() ties {group[0]!r} and {(apart or group)[-1]!r}, but they do not share one storage, or are tied twice."
            )
        tied |= set(group)
    seen: dict[int, str] = {}
    for name, parameter in named.items():
        other = seen.setdefault(id(parameter), name)
        if other != name and not any(name in group and other in group for group in regions.ties):
            raise PluginError(f"{owner}: {other!r} and {name!r} are one parameter, but regions().ties does not say so.")
