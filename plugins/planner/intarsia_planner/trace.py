"""What a piece of the model does when it runs forward and backward on meta tensors: matrix products by shape, bytes that other operators move, and memory over time."""

from __future__ import annotations

import collections
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from intarsia_planner import delta_rule
from intarsia_planner.fake import Log, Message


@dataclasses.dataclass
class Work:
    """What one pass over something costs. `products` are (m, n, k, how many): matrix products and how often; `attention` FLOPs of scores and weighted values by (head dim, backward, whether by context parallelism's
    blocks); `moved` bytes that memory-bound operators read and write, `launches` how many of them there are, `..._alone` those that no compiled region fuses; `messages` in order."""

    products: collections.Counter[tuple[int, int, int]] = dataclasses.field(default_factory=collections.Counter)
    attention: collections.Counter[tuple[int, bool, bool]] = dataclasses.field(default_factory=collections.Counter)
    moved: int = 0
    launches: int = 0
    moved_alone: int = 0
    launches_alone: int = 0
    messages: list[Message] = dataclasses.field(default_factory=list)

    @property
    def flops(self) -> float:
        """Of matrix products and attention."""
        return sum(2.0 * m * n * k * count for (m, n, k), count in self.products.items()) + float(sum(self.attention.values()))

    def add(self, other: Work, times: int = 1) -> None:
        """`times` the other's on top."""
        for shape, count in other.products.items():
            self.products[shape] += count * times
        for key, flops in other.attention.items():
            self.attention[key] += flops * times
        self.moved += other.moved * times
        self.launches += other.launches * times
        self.moved_alone += other.moved_alone * times
        self.launches_alone += other.launches_alone * times
        self.messages += other.messages * times


class Watch(TorchDispatchMode):
    """Counts the work of every operator that runs within it, and the bytes of storages that are made and still live. Storages of `known` tensors do not count."""

    def __init__(self, log: Log, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.log, self.work = log, Work()
        self.live = self.peak = 0
        self._known = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in known}
        self._storages: dict[int, Any] = {}

    def __enter__(self) -> Watch:
        self.log.listener = lambda message: self.work.messages.append(message)
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self.log.listener = None

    def turn(self) -> Work:
        """The work so far; counting starts anew, and the peak from what lives now."""
        work, self.work, self.peak = self.work, Work(), self.live
        return work

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [each for each in tree_flatten(result)[0] if isinstance(each, Tensor)]
        for output in outputs:
            self._meet(output)
        if not self.log.is_inside:
            self._count(func, args, kwargs or {}, outputs)
        return result

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known or key in self._storages:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self.live -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
        packet = getattr(func, "_overloadpacket", func)
        name = str(packet)
        inputs = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        shapes = _product(name, args)
        if shapes is not None:
            for shape, count in shapes:
                self.work.products[shape] += count
            return
        if name.startswith("intarsia_planner.attention"):
            is_backward = name.endswith("backward")
            q, k, v = inputs[is_backward : 3 + is_backward]
            pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1] * args[-1]
            # Backward computes the scores again: five products for forward's two.
            self.work.attention[q.shape[-1], is_backward, False] += int(
                pairs * (q.shape[-1] + v.shape[-1]) * 2 * (2.5 if is_backward else 1)
            )
            return
        if name.startswith("intarsia_planner.delta_rule"):
            is_backward = name.endswith("backward")
            _, k, v = inputs[is_backward : 3 + is_backward]
            # Small products of many chunks within one launch, as in attention, and not a launch each.
            flops = sum(2 * rows * columns * inner * count for (rows, columns, inner), count in delta_rule.products(k, v, is_backward))
            self.work.attention[k.shape[-1], is_backward, False] += flops
            # Forwards two launches go through all of it, and a short one makes the schedule. Backwards two do; what they read of chunks, which is not among these, comes to as much again.
            self.work.moved += sum(each.numel() * each.element_size() for each in (*inputs, *outputs)) * (2 + is_backward)
            self.work.launches += 2 if is_backward else 3
            return
        if name == "intarsia_planner.cross_entropy":
            hidden, weight = inputs[:2]
            chunk, needs = args[2], 1 + args[3] + args[4]
            rows, count = min(chunk, hidden.shape[0]), math.ceil(hidden.shape[0] / chunk)
            self.work.products[rows, weight.shape[0], hidden.shape[1]] += needs * count
            # Logits are written, read twice, overwritten, and read by two products; the weight's float32 sum is read and written for each chunk.
            self.work.moved += hidden.shape[0] * weight.shape[0] * hidden.element_size() * 3 + 8 * count * weight.numel() * bool(args[4])
            self.work.launches += 4 * count
            return
        if name in ("aten._flash_attention_forward", "aten._flash_attention_backward"):
            is_backward = name.endswith("backward")
            q, k, v = inputs[is_backward : 3 + is_backward]
            queries, keys = [each for each in args if isinstance(each, int) and not isinstance(each, bool)][:2]
            seen = keys - (queries - 1) / 2 if kwargs.get("window_size_right", -1) == 0 else keys
            pairs = q.shape[0] * q.shape[1] * seen
            self.work.attention[q.shape[-1], is_backward, True] += int(
                pairs * (q.shape[-1] + v.shape[-1]) * 2 * (2.5 if is_backward else 1)
            )
            return
        if _is_view(func) or name in (
            "aten.empty",
            "aten.new_empty",
            "aten.empty_like",
            "aten.detach",
            "aten.empty_strided",
            "aten.new_empty_strided",
        ):
            return
        moved = sum(each.numel() * each.element_size() for each in {id(each): each for each in (*inputs, *outputs)}.values())
        if "embedding" in name or name in ("aten.gather", "aten.index_select", "aten.index"):
            moved = 2 * sum(each.numel() * each.element_size() for each in outputs)
        if self.log.is_alone:
            self.work.moved_alone += moved
            self.work.launches_alone += 1
        else:
            self.work.moved += moved
            self.work.launches += 1


def _product(name: str, args: tuple[Any, ...]) -> list[tuple[tuple[int, int, int], int]] | None:
    """(m, n, k) and how often, of operators that are matrix products; None for others."""
    if name == "aten.mm":
        return [((args[0].shape[0], args[1].shape[1], args[0].shape[1]), 1)]
    if name == "aten.addmm":
        return [((args[1].shape[0], args[2].shape[1], args[1].shape[1]), 1)]
    if name == "aten.bmm":
        return [((args[0].shape[1], args[1].shape[2], args[0].shape[2]), args[0].shape[0])]
    if name == "aten.baddbmm":
        return [((args[1].shape[1], args[2].shape[2], args[1].shape[2]), args[1].shape[0])]
    if name in ("aten._grouped_mm", "aten._scaled_grouped_mm") or "grouped" in name:
        return _grouped([each for each in args if isinstance(each, Tensor) and each.is_floating_point()])
    return None


def _grouped(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, int, int], int]]:
    """Groups of rows by a stack of matrices, taken as equally large; or, for the matrices' gradients, two tensors of rows."""
    stack = next((each for each in tensors if each.dim() == 3), None)
    if stack is None:
        rows, (first, second) = tensors[0].shape[0 if tensors[0].shape[0] == tensors[1].shape[0] else -1], (tensors[0], tensors[1])
        return [((first.numel() // max(rows, 1), second.numel() // max(rows, 1), rows), 1)]
    rows_tensor = next(each for each in tensors if each.dim() == 2)
    groups = stack.shape[0]
    inner = rows_tensor.shape[1]
    outer = stack.shape[1] if stack.shape[2] == inner else stack.shape[2]
    return [((math.ceil(rows_tensor.shape[0] / groups), outer, inner), groups)]


def _is_view(func: Any) -> bool:
    schema: Any = getattr(func, "_schema", None)
    return schema is not None and any(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a piece keeps from its forward to its backward, its result included and what it was given not; the most that its forward has at once beyond what it was given; and that its
    backward has beyond what was kept, gradients of its parameters (`gradients` of these bytes) included."""

    kept: int
    forward: int
    backward: int
    gradients: int


@dataclasses.dataclass(frozen=True)
class Traced:
    """A piece's forward, its backward (recomputation included) and its memory."""

    forward: Work
    backward: Work
    memory: Memory


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a tree."""
    return [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]


def fresh(value: Any) -> Any:
    """A tree of the same shapes whose floating-point tensors are leaves that want gradients."""
    flat, spec = tree_flatten(value)
    made = [each.detach().clone().requires_grad_() if isinstance(each, Tensor) and each.is_floating_point() else each for each in flat]
    return torch.utils._pytree.tree_unflatten(made, spec)


def run(
    piece: Callable[[Any], Any], inputs: Any, parameters: Sequence[Tensor], known: Sequence[Tensor], log: Log, recompute: bool = False
) -> tuple[Traced, Any]:
    """Trace `piece(inputs)` and its backward. `known` are tensors that are there before and after. Also the result."""
    inputs = fresh(inputs)
    given = leaves(inputs)
    watch = Watch(log, [*given, *parameters, *known])
    with watch:
        result = piece(inputs)
        outputs = [each for each in leaves(result) if each.requires_grad]
        kept, peak = watch.live, watch.peak
        forward = watch.turn()
        if recompute:
            kept = sum(_sizes(outputs, {id(each.untyped_storage()) for each in given}))
        gradients = [torch.empty_like(each) for each in outputs]
        before = watch.live
        watch.turn()
        torch.autograd.backward(outputs, gradients)
        # A block's gradients wait on its parameters until its backward has ended.
        top = watch.peak - before + sum(each.nbytes for each in gradients)
        backward = watch.turn()
    sizes = sum(each.grad.nbytes for each in parameters if each.grad is not None)
    for each in (*parameters, *given):
        each.grad = None
    if recompute:
        backward.add(forward)
        top += max(peak - kept, 0)  # Recomputation brings that back before backward begins.
    return Traced(forward, backward, Memory(kept, peak, top, sizes)), result


def _sizes(tensors: Iterable[Tensor], known: set[int]) -> list[int]:
    found = {}
    for each in tensors:
        storage = each.untyped_storage()
        if id(storage) not in known:
            found[id(storage)] = storage.nbytes()
    return list(found.values())


def saved_when_compiled(piece: Callable[[Any], Any], inputs: Any, known: Sequence[Tensor]) -> tuple[int, int, int]:
    """Bytes that a piece, whose module is compiled, keeps for its backward, its result included: what the partitioner of `torch.compile` keeps, whatever the device. Also the bytes of
    the largest of it and of the result."""
    inputs = fresh(inputs)
    outside = [each.untyped_storage() for each in (*known, *leaves(inputs))]
    there = {storage._cdata for storage in outside}
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in there:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = piece(inputs)
    for each in leaves(result):
        pack(each)
    sizes = [storage.nbytes() for storage in kept.values()]
    return sum(sizes), max(sizes, default=0), sum(each.nbytes for each in leaves(result))
