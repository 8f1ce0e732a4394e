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
    """Where the whole parameters of a bucket are, to be compared later."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._slot, self._places = bucket, bucket.slot, [parameter.data_ptr() for parameter in bucket.whole.values()]

    def check_places(self) -> None:
        """Raise UsageError where a parameter has left the bucket's memory."""
        bucket = self._bucket
        places = [parameter.data_ptr() for parameter in bucket.whole.values()]
        if bucket.slot is not self._slot:
            self._slot, self._places = bucket.slot, places
        if places != self._places:
            name = next(name for name, place, before in zip(bucket.whole, places, self._places, strict=True) if place != before)
            raise UsageError(
                f"Parameter {name!r} was given other memory after bucket {bucket.name!r} was sharded: a gather would not reach it. Do not call `to`, `half`, "
                "`float` and the like, or set `.data`, on a sharded model; dtype and device are precision.compute's and the mesh's."
            )

    def check_trained(self) -> None:
        """Raise UsageError where a parameter is trained now and was not, or the reverse."""
        for info in self._bucket.infos:
            if self._bucket.whole[info.name].requires_grad != info.trainable:
                raise UsageError(
                    f"Parameter {info.name!r}: requires_grad is {not info.trainable} and was {info.trainable} when bucket {self._bucket.name!r} was sharded. Its gradient would "
                    "not be reduced, or zeros in its place. Freeze parameters before sharding (a parameter group with `frozen`), and shard anew to change that."
                )


def check_values(masters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Raise UsageError where a value is of no master, or does not fit its own."""
    for name, value in values.items():
        if name not in masters:
            raise UsageError(f"load_masters: there is no parameter {name!r} among the masters.")
        if value.shape != masters[name].shape:
            raise UsageError(f"load_masters: {name!r} has shape {list(value.shape)}, and this rank's master {list(masters[name].shape)}.")
