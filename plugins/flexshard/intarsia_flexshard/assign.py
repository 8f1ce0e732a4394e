"""Which bucket each parameter is in, and everything that holds for the bucket. Torch-free and pure.

The recipe's buckets claim first, by glob; a parameter that two of them claim is an error, as is a glob that claims nothing. What is left goes to one bucket for
each declared block, and to `root` for what is in none. A tied parameter is one parameter with several names: whoever claims one of them has it.

What has to be summed over other ranks than the rest of its bucket (`intarsia_flexshard.axes`) gets a bucket beside it, `layers.3:ep_shard`, and so does a parameter that other
pipeline stages have too.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import chz
from intarsia.config import PlacementConfig
from intarsia.contracts import Member
from intarsia.errors import UsageError, did_you_mean

from intarsia_flexshard.axes import AXES, Span, default_divisor, span_of
from intarsia_flexshard.config import BucketConfig, FlexShardConfig

ROOT = "root"
OFFLOADS = ("none", "cpu", "low")
REDUCE_OPS = ("sum", "average")
PAYLOADS = ("plain", "fp8")
GRADIENTS = ("whole", "sharded")
MASTERS = ("float32", "split")
OWNERS = ("elements", "newton_schulz")
DTYPES = ("float64", "float32", "float16", "bfloat16")

# Newton-Schulz iterations that an update is taken to make, and the FLOPs that a device does while it moves one element's gradient, momentum and master.
NEWTON_SCHULZ_STEPS = 5
FLOPS_PER_ELEMENT = 4096


class Info(Protocol):
    """What is read of an `intarsia.parameters.ParameterInfo`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...]
    block: str


@dataclasses.dataclass(frozen=True)
class BucketSpec:
    """One bucket, everything resolved. Stability: provisional.

    `infos` are in the model's order. `axes` cut, along `replicas` all is equal. `compute` and `reduce` are dtype names. `reshard` is always, never or
    after; `keep` is after how many further unshardings the whole parameters are given back (always: 1; never: 0, which is at the step's end). `divisor` is what
    an average divides by (None: the number of ranks). `modules` are the modules whose forward needs the bucket; "" is the model. `is_shared`: other pipeline stages have
    its one parameter too, and gradients are summed over them at the step's end.
    """

    name: str
    infos: tuple[Info, ...]
    placement: PlacementConfig
    axes: tuple[str, ...]
    replicas: tuple[str, ...]
    compute: str
    reduce: str
    reshard: str
    keep: int
    offload: str
    reduce_op: str
    divisor: float | None
    prefetch: int
    payload: str
    modules: tuple[str, ...]
    is_shared: bool = False

    @property
    def is_root(self) -> bool:
        """Whether the model itself drives the bucket, which then stays whole to the step's end."""
        return "" in self.modules

    @property
    def is_kept(self) -> bool:
        """Whether it stays whole to the step's end, in memory of its own."""
        return self.reshard == "never" or self.is_root

    @property
    def members(self) -> list[Any]:
        """`infos` as the runtime lays them out, trained ones first: then masters and gradients lie alike."""
        return sorted(self.infos, key=lambda info: not info.trainable)

    @property
    def numel(self) -> int:
        """Elements of all whole parameters."""
        return sum(math.prod(info.shape) for info in self.infos)


def assign(
    config: FlexShardConfig,
    infos: Iterable[Info],
    blocks: Sequence[str],
    modules: Collection[str] | None = None,
    compute: str | None = None,
    reduce: str | None = None,
    outside: Collection[str] = (),
    sizes: Mapping[str, int] | None = None,
    elsewhere: Collection[str] = (),
    wide: Collection[str] = (),
) -> list[BucketSpec]:
    """The buckets in execution order (those that the model drives come first): every parameter is in exactly one.

    Arguments: `infos` in the model's order; `blocks` the declared blocks in execution order; `modules` the names of modules that have a forward of their own
    (containers have none, and drive nothing; None: all have one); `compute` and `reduce` the run's dtypes (None: the masters'); `outside` parameters that
    are read outside of their module's forward, as losses read the head's: the model drives their bucket; `sizes` the mesh's axes (None: data parallelism alone);
    `elsewhere` globs that match in other pipeline stages; `wide` parameters that stay float32 where the run computes in fewer bits (`keeps_float32`). Raises UsageError for words and numbers that mean nothing, for globs without a
    parameter, for a parameter that two buckets claim, for buckets of several dtypes, and for axes over which a gradient would not be summed.
    """
    check_settings(config)
    infos = list(infos)
    sizes = sizes or {}
    claimed = _claims(config.buckets, infos, elsewhere)
    found: list[tuple[BucketConfig, list[Info], bool]] = [
        (bucket, [info for info in infos if claimed.get(info.name) == index], False) for index, bucket in enumerate(config.buckets)
    ]
    rest: dict[str, list[Info]] = {}
    for info in infos:
        if info.name not in claimed:
            rest.setdefault(info.block, []).append(info)
    found += [(BucketConfig(name=block or ROOT, match=()), rest[block], True) for block in ("", *blocks) if block in rest]
    _check_names([bucket.name for bucket, _, _ in found], len(config.buckets))
    order = _execution_order(infos, blocks)
    specs = []
    for bucket, members, is_default in found:
        for name, span, part in _parts(bucket, members, sizes):
            for narrowed, some in _by_width(config, chz.replace(bucket, name=name), part, compute, wide):
                inside = [some[0].block] if is_default else _drivers(some, modules, outside)
                specs.append(_spec(config, narrowed, span, some, tuple(inside), (compute, reduce), sizes))
    _check_names([spec.name for spec in specs], len(specs))
    return sorted(specs, key=lambda spec: (not spec.is_root, min(order[info.name] for info in spec.infos)))


def _by_width(
    config: FlexShardConfig, bucket: BucketConfig, members: list[Info], compute: str | None, wide: Collection[str]
) -> list[tuple[BucketConfig, list[Info]]]:
    """The bucket, without those members that stay float32 in spite of the run's dtype, which are gathered as they are. What a bucket says of itself holds for all of it, and halves of
    masters have one dtype."""
    if bucket.compute is not None or compute not in ("bfloat16", "float16") or config.master == "split":
        return [(bucket, members)]
    kept = [info for info in members if info.name in wide]
    rest = [info for info in members if info.name not in wide]
    if not kept:
        return [(bucket, members)]
    apart = chz.replace(bucket, name=f"{bucket.name}:float32" if rest else bucket.name, compute="float32", payload="plain")
    return [(bucket, rest), (apart, kept)] if rest else [(apart, kept)]


def compute_dtypes(config: FlexShardConfig, infos: Iterable[Info], compute: str, wide: Collection[str]) -> dict[str, str]:
    """By canonical name the dtype in which a parameter is computed with; arguments as those of `assign`."""
    infos, found = list(infos), {}
    claimed = _claims(config.buckets, infos, ())
    for info in infos:
        bucket = config.buckets[claimed[info.name]] if info.name in claimed else BucketConfig(name=ROOT, match=())
        some = _by_width(config, bucket, [info], compute, wide)
        found[info.name] = some[0][0].compute or compute
    return found


def kept_wide(model: Any) -> list[str]:
    """The names of the parameters that their modules want in float32 whatever a run computes in (the class attribute `keeps_float32`: routers' weights)."""
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name in getattr(type(module), "keeps_float32", ()):
            found.append(f"{prefix}.{name}" if prefix else name)
    return found


def read_outside(model: Any) -> list[str]:
    """The names of the parameters that are read outside of their module's forward: the head's weight, which losses ask the model for (`intarsia.contracts.Model`)."""
    head = getattr(model, "head_weight_VD", None)
    return [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is head]


def member_of(info: Info, shape: Sequence[int] | None = None, owners: str = "elements") -> Member:
    """A parameter as placements see it: `shape` is what outer cuts left of it (None: all), `owners` says what its cost means."""
    shape = tuple(info.shape if shape is None else shape)
    return Member(info.name, shape, info.dtype, cost=newton_schulz_cost(shape) if owners == "newton_schulz" else 0.0)


def newton_schulz_cost(shape: Sequence[int]) -> float:
    """FLOPs of the update of a tensor by Muon, memory traffic counted as the FLOPs that it takes the time of.

    Steps on an m x n matrix, m <= n, that stay with its Gram matrix A = X X^T multiply that once (m^2 n, a symmetric product being half of a whole one), then symmetric m x m
    matrices (m^3: four products a step, one in the last), and apply the result to X (2 m^2 n): a long side costs far less than it does where every step takes the whole matrix. A stack
    of matrices is as many of them; anything with fewer than two dimensions or more than three only moves its elements.
    """
    traffic = float(FLOPS_PER_ELEMENT * math.prod(shape))
    if len(shape) not in (2, 3):
        return traffic
    low, high = sorted(shape[-2:])
    return traffic + math.prod(shape[:-2]) * float(3 * low * low * high + (4 * NEWTON_SCHULZ_STEPS - 3) * low**3)


# ---------------------------------------------------------------- who claims what


def is_match(glob: str, name: str) -> bool:
    """Whether a bucket's glob takes the parameter: by its name, or by the name of a module above it."""
    return fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(name, f"{glob}.*")


def unmatched(config: FlexShardConfig, infos: Iterable[Info]) -> list[str]:
    """The buckets' globs that match none of these parameters."""
    names = [name for info in infos for name in (info.name, *info.aliases)]
    return [glob for bucket in config.buckets for glob in bucket.match if not any(is_match(glob, name) for name in names)]


def _claims(buckets: Sequence[BucketConfig], infos: Sequence[Info], elsewhere: Collection[str]) -> dict[str, int]:
    """For each claimed parameter the number of its bucket."""
    claimed: dict[str, int] = {}
    globs: dict[str, str] = {}
    clashes: list[str] = []
    names = [name for info in infos for name in (info.name, *info.aliases)]
    for index, bucket in enumerate(buckets):
        if not bucket.match:
            raise UsageError(
                f"Bucket {bucket.name!r} is empty: its `match` names no glob. Name parameters or modules, or remove the bucket."
            )
        for glob in bucket.match:
            hits = [(info, name) for info in infos for name in (info.name, *info.aliases) if is_match(glob, name)]
            if not hits and glob not in elsewhere:
                known = [*names, *_parents(names)]
                raise UsageError(f"Bucket {bucket.name!r}: {glob!r} matches no parameter of the model. {did_you_mean(glob, known)}")
            for info, name in hits:
                first = claimed.setdefault(info.name, index)
                globs.setdefault(info.name, glob)
                if first != index:
                    called = repr(info.name) if name == info.name else f"{info.name!r} (tied to {name!r})"
                    clashes.append(f"{called} by {buckets[first].name!r} ({globs[info.name]!r}) and by {bucket.name!r} ({glob!r})")
    if clashes:
        more = f"; and {len(clashes) - 4} more" if len(clashes) > 4 else ""
        raise UsageError(
            f"sharder.buckets: parameters are claimed twice: {'; '.join(clashes[:4])}{more}. Every parameter is in one bucket: narrow one of the globs."
        )
    return claimed


def _parts(bucket: BucketConfig, members: Sequence[Info], sizes: Mapping[str, int]) -> list[tuple[str, Span, list[Info]]]:
    """The bucket's members by what has to be summed over the same ranks: name, axes and members of each. What no other parallelism cuts keeps the bucket's name."""
    found: dict[tuple[Span, str], list[Info]] = {}
    for info in members:
        span = span_of(bucket.name, bucket.axes, bucket.replicas, info, sizes)
        found.setdefault((span, info.name if getattr(info, "absent", ()) else ""), []).append(info)
    if not found:
        return []
    plain = max(found, key=lambda key: (not key[1], "ep_shard" not in key[0].axes, sum(map(len, key[0])), len(key[0].axes)))
    parts, taken = [], {bucket.name}
    for key, part in found.items():
        (axes, replicas), shared = key
        name = bucket.name
        if shared:
            name += f":{shared}"
        elif key != plain:
            name += f":{'+'.join(axes)}"
            name += f":{'+'.join(replicas)}" if name in taken else ""
        taken.add(name)
        parts.append((name, key[0], part))
    return parts


def names_here(info: Info) -> tuple[str, ...]:
    """The names under which this process's model has the parameter: other pipeline stages may have those of a tie."""
    absent = getattr(info, "absent", ())
    return tuple(name for name in (info.name, *info.aliases) if name not in absent)


def _parents(names: Iterable[str]) -> list[str]:
    """The modules above these parameters or modules, without the model."""
    found: dict[str, None] = {}
    for name in names:
        while name := name.rpartition(".")[0]:
            found[name] = None
    return list(found)


def _check_names(names: Sequence[str], own: int) -> None:
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in seen:
            why = "there are two of it" if index < own else "what no bucket claims there has a bucket of this name"
            raise UsageError(f"sharder.buckets: the name {name!r} is taken: {why}. Choose another name.")
        seen[name] = index
    if "" in seen:
        raise UsageError("sharder.buckets: a bucket has an empty name; name it as messages and traces shall call it.")


# ---------------------------------------------------------------- who drives what, and when


def _drivers(members: Sequence[Info], modules: Collection[str] | None, outside: Collection[str]) -> list[str]:
    """The deepest module that all parameters of a block are in, for each block; for parameters outside of blocks the modules that own them."""
    owners: dict[str, list[str]] = {}
    found: dict[str, None] = {}
    for info in members:
        for name in names_here(info):
            if info.name in outside or name in outside:
                found[""] = None
            elif info.block:
                owners.setdefault(info.block, []).append(name.rpartition(".")[0])
            else:
                found[_running(name.rpartition(".")[0], "", modules)] = None
    for block, paths in owners.items():
        found[_running(_common(paths), block, modules)] = None
    # A module inside another that drives the bucket too has nothing to add.
    return [""] if "" in found else [module for module in found if not found.keys() & set(_parents([module]))]


def _common(paths: Sequence[str]) -> str:
    """The deepest module that all of the modules are or lie in."""
    first, last = min(split := [path.split(".") for path in paths]), max(split)
    shared = next((index for index, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return ".".join(first[:shared])


def _running(module: str, top: str, modules: Collection[str] | None) -> str:
    """The module, or the nearest one around it that has a forward of its own; `top` at the latest."""
    while module != top and modules is not None and module not in modules:
        module = module.rpartition(".")[0]
    return module


def _execution_order(infos: Sequence[Info], blocks: Sequence[str]) -> dict[str, tuple[int, int]]:
    """A sort key for each parameter: blocks as declared; what is in none runs before the blocks, or after them where the model declares it after their first."""
    number = {block: index for index, block in enumerate(blocks, start=1)}
    first = next((index for index, info in enumerate(infos) if info.block), len(infos))
    places = [number[info.block] if info.block else 0 if index < first else len(number) + 1 for index, info in enumerate(infos)]
    return {info.name: (place, index) for index, (info, place) in enumerate(zip(infos, places, strict=True))}


# ---------------------------------------------------------------- settings


def check_settings(config: FlexShardConfig) -> None:
    """Raise UsageError for a word that is not known or a number that means nothing, here or in a bucket."""
    for field, words in (("gradients", GRADIENTS), ("master", MASTERS), ("owners", OWNERS)):
        _check_word(f"sharder.{field}", getattr(config, field), words)
    _check_shared(config, "sharder")
    for bucket in config.buckets:
        where = f"Bucket {bucket.name!r}: "
        _check_shared(bucket, where)
        for field in ("compute", "reduce"):
            if getattr(bucket, field) is not None:
                _check_word(where + field, getattr(bucket, field), DTYPES)
        named = (*(bucket.axes or ()), *(bucket.replicas or ()))
        for axis in named:
            _check_word(f"{where}axes or replicas", axis, AXES)
        both = [axis for axis in AXES if named.count(axis) > 1]
        if both:
            raise UsageError(
                f"{where}axis {both[0]!r} is named twice in axes and replicas; along an axis a bucket is either cut or replicated."
            )
        if bucket.axes == ():
            raise UsageError(f"{where}`axes` is empty. To keep the bucket whole on every rank, choose placement=replicate.")


def parse_reshard(text: str, where: str = "sharder.reshard") -> tuple[str, int]:
    """(always, 1), (never, 0), or (after, N) of `after N`. Raises UsageError."""
    if text in ("always", "never"):
        return text, int(text == "always")
    word, _, count = text.partition(" ")
    if word == "after" and count.isascii() and count.isdecimal() and int(count) >= 1:
        return word, int(count)
    if word == "after":
        raise UsageError(f"{where} is {text!r}; write `after N` with N of at least 1, such as 'after 2'.")
    raise UsageError(f"{where} is {text!r}. {did_you_mean(text, ('always', 'never', 'after 2'))}")


def _check_word(where: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        raise UsageError(f"{where} is {word!r}. {did_you_mean(word, known)}")


def _check_shared(config: BucketConfig | FlexShardConfig, where: str) -> None:
    """The settings that the sharder and a bucket have both; None in a bucket is the sharder's."""
    at = where + "." if where == "sharder" else where
    for field, words in (("offload", OFFLOADS), ("reduce_op", REDUCE_OPS), ("payload", PAYLOADS)):
        if getattr(config, field) is not None:
            _check_word(at + field, getattr(config, field), words)
    if config.reshard is not None:
        parse_reshard(config.reshard, f"{at}reshard")
    if config.prefetch is not None and config.prefetch < 0:
        raise UsageError(f"{at}prefetch is {config.prefetch}; it is a number of buckets, 0 or more.")
    if config.divisor is not None and not (math.isfinite(config.divisor) and config.divisor > 0):
        raise UsageError(f"{at}divisor is {config.divisor}; it is a finite number above 0.")


def _spec(
    config: FlexShardConfig,
    bucket: BucketConfig,
    span: Span,
    members: Sequence[Info],
    modules: tuple[str, ...],
    dtypes: tuple[str | None, str | None],
    sizes: Mapping[str, int],
) -> BucketSpec:
    masters: dict[str, str] = {info.dtype: info.name for info in reversed(members)}
    if len(masters) > 1:
        shown = " and ".join(f"{name!r} is {dtype}" for dtype, name in reversed(masters.items()))
        raise UsageError(f"Bucket {bucket.name!r} mixes dtypes: {shown}. A bucket has one master dtype: put them in buckets of their own.")
    master = next(iter(masters))
    values = {
        field: getattr(bucket, field) if getattr(bucket, field) is not None else getattr(config, field)
        for field in ("placement", "offload", "reduce_op", "prefetch", "payload", "reshard")
    }
    # An average's divisor says nothing about a bucket that sums.
    divisor = bucket.divisor if bucket.divisor is not None or bucket.reduce_op not in (None, config.reduce_op) else config.divisor
    if divisor is not None and values["reduce_op"] == "sum":
        raise UsageError(
            f"Bucket {bucket.name!r}: divisor is {divisor}, but reduce_op is 'sum', which never divides. Choose reduce_op=average, or leave divisor out."
        )
    if divisor is None and values["reduce_op"] == "average":
        divisor = default_divisor(sizes)
    reshard, keep = ("never", 0) if "" in modules else parse_reshard(values.pop("reshard"))
    values.pop("reshard", None)
    return BucketSpec(
        name=bucket.name, infos=tuple(members), axes=span.axes, replicas=span.replicas, compute=bucket.compute or dtypes[0] or master,
        reduce=bucket.reduce or dtypes[1] or master, reshard=reshard, keep=keep, divisor=divisor, modules=modules,
        is_shared=any(getattr(info, "absent", ()) for info in members), **values,
    )  # fmt: skip
