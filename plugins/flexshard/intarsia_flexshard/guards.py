"""A sharded model's parameters are views of memory that buckets take turns in. What would read them as if they were values, replace them or change what the plan says of them is
told, and not done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from intarsia.errors import UsageError
from torch import Tensor, nn

if TYPE_CHECKING:
    from intarsia_flexshard.bucket import Bucket

ADVICE = "Values are in `sharded.masters()`, cut as the table's layouts say; `load_masters` takes them back, and checkpoints hold them."


def refuse_copies(modules: Iterable[nn.Module], buckets: Iterable[Bucket]) -> None:
    """`deepcopy`, `state_dict` and `load_state_dict` of sharded modules raise UsageError: they would copy whatever is in the ring at that moment."""
    owned = {id(parameter) for bucket in buckets for parameter in bucket.whole.values()}
    for module in modules:
        if any(id(parameter) in owned for parameter in module.parameters(recurse=False)):
            module.register_state_dict_pre_hook(_no_state_dict)
            module.register_load_state_dict_pre_hook(_no_load)
    for bucket in buckets:
        for parameter in bucket.whole.values():
            parameter.__deepcopy__ = _no_copy  # type: ignore[method-assign]


def _no_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> NoReturn:
    raise UsageError(
        f"state_dict of a sharded {type(module).__name__}: its parameters are whole within its forward and backward only. {ADVICE}"
    )


def _no_load(module: nn.Module, *arguments: Any) -> NoReturn:
    raise UsageError(f"load_state_dict of a sharded {type(module).__name__}: the next gather would overwrite what was loaded. {ADVICE}")


def _no_copy(memo: Any) -> NoReturn:
    raise UsageError(f"A sharded model cannot be copied: the copy would share its hooks and shards. Build and shard another one. {ADVICE}")


class Places:
    """Where the whole parameters of buckets are, and which are trained, to be compared later."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._buckets = list(buckets)
        self._of = [(bucket, name) for bucket in self._buckets for name in bucket.whole]
        self._parameters = [bucket.whole[name] for bucket, name in self._of]
        self._trained = [info.trainable for bucket in self._buckets for info in bucket.infos]
        self._slots, self._places = self._now()

    def _now(self) -> tuple[list[Any], list[int]]:
        return [bucket.slot for bucket in self._buckets], list(map(Tensor.data_ptr, self._parameters))

    def check_places(self) -> None:
        """Raise UsageError where a parameter has left its bucket's memory."""
        slots, places = self._now()
        if places == self._places and slots == self._slots:
            return
        moved = {bucket for bucket, slot, before in zip(self._buckets, slots, self._slots, strict=True) if slot is not before}
        for (bucket, name), place, before in zip(self._of, places, self._places, strict=True):
            if place != before and bucket not in moved:
                raise UsageError(
                    f"Parameter {name!r} was given other memory after bucket {bucket.name!r} was sharded: a gather would not reach it. Do not call `to`, `half`, "
                    "`float` and the like, or set `.data`, on a sharded model; dtype and device are precision.compute's and the mesh's."
                )
        self._slots, self._places = slots, places

    def check_trained(self) -> None:
        """Raise UsageError where a parameter is trained now and was not, or the reverse."""
        now = [parameter.requires_grad for parameter in self._parameters]
        if now == self._trained:
            return
        bucket, name = next(each for each, is_now, was in zip(self._of, now, self._trained, strict=True) if is_now != was)
        was = not bucket.whole[name].requires_grad
        raise UsageError(
            f"Parameter {name!r}: requires_grad is {not was} and was {was} when bucket {bucket.name!r} was sharded. Its gradient would "
            "not be reduced, or zeros in its place. Freeze parameters before sharding (a parameter group with `frozen`), and shard anew to change that."
        )


def check_values(masters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Raise UsageError where a value is of no master, or does not fit its own."""
    for name, value in values.items():
        if name not in masters:
            raise UsageError(f"load_masters: there is no parameter {name!r} among the masters.")
        if value.shape != masters[name].shape:
            raise UsageError(f"load_masters: {name!r} has shape {list(value.shape)}, and this rank's master {list(masters[name].shape)}.")
