"""A generator takes a published version: reads it, copies it into its model, reads the model back and compares digests."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence

import torch
from intarsia.contracts import Box
from intarsia.discovery import import_reference
from intarsia.errors import NumericsError, PluginError, UsageError, did_you_mean
from intarsia.layout import Layout, box_text, find_overlap, region_numel, slices
from intarsia.parameters import persistent_buffers
from intarsia.plugins import Plugins
from torch import Tensor, nn

from intarsia_rl.contracts import WeightVersion
from intarsia_rl.weights import digest

_FILLED = "_filled_weights"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor that a model holds: `box` (None: all) of the canonical tensor `name` lies in the box `where` (None: all) of the holder's own.

    Both boxes have the same elements in the same row-major order; their shapes may differ (an expert's matrix in a stack of them). Stability: provisional.
    """

    name: str
    box: Box | None = None
    where: Box | None = None


Holds = Mapping[str, Sequence[Part]]
"""By a model's own name of a parameter or persistent buffer the parts of canonical tensors that it is made of. Stability: provisional."""


def held_parts(layouts: Mapping[str, Layout], rank: int) -> dict[str, tuple[Part, ...]]:
    """What rank `rank` of a generator's mesh holds where its tensors are cut as `layouts` say, by canonical name: a tensor of the shape of its box where it is one, else 1-D in
    storage order. Tensors of which the rank has nothing hold nothing. Stability: provisional."""
    found: dict[str, tuple[Part, ...]] = {}
    for name, layout in layouts.items():
        region, offset, parts = layout.local(rank), 0, []
        for box in region:
            parts.append(Part(name, box, None if len(region) == 1 else Box((offset,), (box.numel,))))
            offset += box.numel
        found[name] = tuple(parts)
    return found


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter and its canonical one, in the model's order."""
    regions = model.regions() if hasattr(model, "regions") else None  # type: ignore[operator]
    aliases = {alias: group[0] for group in (regions.ties if regions is not None else ()) for alias in group[1:]}
    return {name: aliases.get(name, name) for name, _ in model.named_parameters(remove_duplicate=False)}


def filled_version(model: nn.Module) -> int | None:
    """The version that `fill` has put into the model whole; None where it has none, or a fill was interrupted: do not serve it then. Stability: provisional."""
    return getattr(model, _FILLED, (None, None))[0]


def forget(model: nn.Module) -> None:
    """The model's weights change otherwise than by `fill`."""
    setattr(model, _FILLED, (None, None))


@torch.no_grad()
def fill(
    model: nn.Module,
    weights: WeightVersion,
    plugins: Plugins,
    holds: Holds | None = None,
    combine: Callable[[Tensor], Tensor] | None = None,
    skips: Collection[str] = (),
) -> None:
    """Put a version into a model, in place, and prove that it is there: the digests of what the model has then must be those that were published.

    Arguments: `holds` says what the model's tensors are made of, for those that are not a canonical tensor, whole (the model's attribute `holds()` where None). `combine` adds an int64
    tensor up, in place, over the ranks that hold the model's other parts: then parts are compared with what was published as well; without it they are compared with
    what was read. `skips` are published tensors that the model knowingly leaves out. A tensor of fewer bits than the published one gets it rounded to nearest even.

    Errors: NumericsError names the tensors that differ; UsageError those that fit nothing; DistributedError where the version can no longer be read. After each of them the
    model may be a mix: `filled_version` is None and it must not serve. A version that the model has is there at once.
    Stability: provisional.
    """
    if getattr(model, _FILLED, (None, None)) == (weights.version, weights.digests):
        return
    copies = _plan(model, weights, holds, skips)
    forget(model)
    by_name: dict[str, list[_Copy]] = {}
    for copy in copies:
        by_name.setdefault(copy.name, []).append(copy)
    boxes = {name: [copy.box for copy in found] for name, found in by_name.items()}
    cut = {name: found for name, found in boxes.items() if found != [Box.whole(weights.shapes[name])]}
    ordered = [copy for found in by_name.values() for copy in found]
    check = _Check(weights, by_name, combine)
    reader = _reader(weights.transport, plugins)
    options = {"device": _device(ordered)} if "device" in inspect.signature(reader).parameters else {}
    with contextlib.closing(reader(weights.location, list(by_name), cut, **options)) as values:
        for (name, value), copy in zip(values, ordered, strict=True):
            if name != copy.name or tuple(value.shape) != copy.box.size:
                raise PluginError(
                    f"The reader of weight transport {weights.transport!r} gave {name} of shape {tuple(value.shape)} where {copy.name} {box_text(copy.box)} was asked for."
                )
            copy.target.copy_(value.reshape(copy.target.shape))
            check.read(copy, value)
    for copy in ordered:
        check.held(copy)
    check.compare()
    setattr(model, _FILLED, (weights.version, weights.digests))


@dataclasses.dataclass(frozen=True, eq=False)
class _Copy:
    """A box of a published tensor and where it goes: a view into the model."""

    name: str
    box: Box
    target: Tensor
    own: str


class _Check:
    """The digests' sums of what was read and of what the model has then, of every box."""

    def __init__(self, weights: WeightVersion, copies: Mapping[str, Sequence[_Copy]], combine: Callable[[Tensor], Tensor] | None) -> None:
        self._weights, self._copies, self._combine = weights, copies, combine
        # A box that the model has several times counts once.
        distinct = {name: tuple(dict.fromkeys(copy.box for copy in found)) for name, found in copies.items()}
        self._complete = {name: _covers(boxes, weights.shapes[name]) for name, boxes in distinct.items()}
        self._read: dict[_Copy, Tensor] = {}
        self._rounded: dict[_Copy, Tensor] = {}
        self._held: dict[_Copy, Tensor] = {}

    def _keeps(self, copy: _Copy) -> torch.dtype | None:
        """The published dtype where the target keeps all of its values."""
        published: torch.dtype = getattr(torch, self._weights.dtypes[copy.name])
        own = copy.target.dtype
        wider = published.is_floating_point and published.itemsize > 1 and torch.promote_types(published, own) == own
        return published if published == own or wider else None

    def _sums(self, copy: _Copy, values: Tensor) -> Tensor:
        return digest.partial(values, self._weights.shapes[copy.name], copy.box)

    def read(self, copy: _Copy, values: Tensor) -> None:
        """What came from the transport, where the model's own memory cannot tell whether that was right."""
        keeps = self._keeps(copy)
        if keeps is None or not (self._complete[copy.name] or self._combine):
            self._read[copy] = self._sums(copy, values)
        if keeps is None:
            self._rounded[copy] = self._sums(copy, values.to(copy.target.dtype))

    def held(self, copy: _Copy) -> None:
        """What the model has."""
        keeps = self._keeps(copy)
        self._held[copy] = self._sums(copy, copy.target if keeps is None else copy.target.to(keeps))

    def compare(self) -> None:
        """NumericsError unless all is as it was published."""
        read, rounded, held = (_on_cpu(sums) for sums in (self._read, self._rounded, self._held))
        wrong = [copy.name for copy, sums in held.items() if sums != rounded.get(copy, read.get(copy, sums))]
        totals: dict[str, list[int]] = {}
        for name, copies in self._copies.items():
            found: dict[Box, list[int]] = {}
            for copy in copies:
                sums = read.get(copy, held[copy])
                wrong += [name] if found.setdefault(copy.box, sums) != sums else []
            totals[name] = [sum(column) for column in zip(*found.values(), strict=True)]
        split = sorted(name for name in totals if not self._complete[name])
        if self._combine is not None and split:
            mine = torch.tensor([[digest.signed(value) for value in totals[name]] for name in split])
            totals |= dict(zip(split, self._combine(mine).tolist(), strict=True))
        for name, sums in totals.items():
            found_text = digest.text(sums, self._weights.dtypes[name], self._weights.shapes[name])
            if (self._complete[name] or self._combine is not None) and found_text != self._weights.digests[name]:
                wrong.append(name)
        if wrong:
            names = list(dict.fromkeys(wrong))
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise NumericsError(
                f"Version {self._weights.version} of the weights is not in the model as {self._weights.transport!r} published it: {', '.join(names[:8])}{more} "
                f"differ{'s' if len(names) == 1 else ''}. The model must not be used before a version has arrived whole."
            )


def _covers(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether each element of a tensor is in exactly one of the boxes."""
    return find_overlap(boxes) is None and region_numel(tuple(boxes)) == math.prod(list(shape))


def _on_cpu(sums: Mapping[_Copy, Tensor]) -> dict[_Copy, list[int]]:
    """The sums as numbers, in one copy from the device."""
    if not sums:
        return {}
    device = next(iter(sums.values())).device
    values = torch.stack([each.to(device) for each in sums.values()]).tolist()
    return dict(zip(sums, values, strict=True))


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by canonical name, and persistent buffers."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {name: named[name].detach() for name, canonical in canonical_names(model).items() if name == canonical} | persistent_buffers(
        model
    )


def _plan(model: nn.Module, weights: WeightVersion, holds: Holds | None, skips: Collection[str]) -> list[_Copy]:
    """Every copy. UsageError, with all that is wrong, where what the model holds and what was published do not fit."""
    own = own_tensors(model)
    stated = holds if holds is not None else model.holds() if hasattr(model, "holds") else {}  # type: ignore[operator]
    problems = [
        f"the model says that it holds {name}, which it does not have. {did_you_mean(name, own)}" for name in stated if name not in own
    ]
    copies = []
    for name, tensor in own.items():
        for part in stated.get(name, (Part(name),)):
            if part.name not in weights.shapes:
                problems.append(f"{name} wants {part.name}, which was not published. {did_you_mean(part.name, weights.shapes)}")
                continue
            shape = tuple(weights.shapes[part.name])
            box, where = part.box or Box.whole(shape), part.where or Box.whole(tensor.shape)
            target = tensor[slices(where)]
            fits = target.numel() == box.numel and all(a <= n for a, n in zip(box.end, shape, strict=True)) and target.shape == where.size
            if fits and (part.where is not None or part.box is not None or shape == tuple(tensor.shape)):
                copies.append(_Copy(part.name, box, target, name))
            else:
                problems.append(
                    f"{name} has shape {list(tensor.shape)} and cannot take {part.name} {box_text(box)} of {list(shape)} at {box_text(where)}"
                )
        problems += _uncovered(name, tensor, stated.get(name, (Part(name),)))
    taken = {copy.name for copy in copies} | set(stated) | set(skips)
    problems += [f"nothing in the model takes {name}" for name in weights.shapes if name not in taken and 0 not in weights.shapes[name]]
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise UsageError(f"Version {weights.version} of the weights does not fit the model:\n  " + "\n  ".join(problems[:8]) + more)
    return [copy for copy in copies if copy.box.numel]


def _uncovered(own: str, tensor: Tensor, parts: Sequence[Part]) -> list[str]:
    """What is wrong with the places that the parts of a tensor of the model go to, where they do not make all of it."""
    places = [part.where or Box.whole(tensor.shape) for part in parts]
    filled = [place for place in places if place.numel]
    if len({len(place.start) for place in places} - {tensor.ndim}) == 0 and _covers(filled, tensor.shape):
        return []
    return [
        f"the parts that {own} of shape {list(tensor.shape)} is made of do not cover it once: {', '.join(map(box_text, places)) or 'none'}"
    ]


def _device(copies: Sequence[_Copy]) -> torch.device:
    """Where the model is; of several devices the CPU."""
    devices = {copy.target.device for copy in copies}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _reader(transport: str, plugins: Plugins) -> Callable[..., Generator[tuple[str, Tensor], None, None]]:
    entry = plugins.registry("weight transport").find(transport)
    reference = getattr(plugins.target(entry), "reader", None)
    if not isinstance(reference, str):
        raise PluginError(
            f'The target of weight transport {entry.full_name!r} has no `reader`: a class attribute "module:function" that generators read by.'
        )
    found: Callable[..., Generator[tuple[str, Tensor], None, None]] = import_reference(reference)
    return found
