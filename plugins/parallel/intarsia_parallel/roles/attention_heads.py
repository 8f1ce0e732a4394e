"""attention_heads: a region whose projections are cut by whole query heads.

The query projection (`column`), the output projection (`row`) and parameters with one row for each head are cut with the heads. Key/value heads are shared out
where tp divides them; elsewhere, tp above their number included, their projections stay whole on every rank, and a rank computes only those of their heads that its
query heads read. This overrules the projections' own rows in the table.

Gradients: of what is cut, whole in what this rank's heads say; of whole key/value projections and of norms over a head's width, partial sums along tp. The
module's caches and FLOPs are this rank's heads'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from intarsia import ops
from intarsia.comm import Communicator
from intarsia.contracts import Placement
from intarsia.errors import UsageError, did_you_mean
from torch import Tensor, nn

from intarsia_parallel.config import AttentionHeadsConfig
from intarsia_parallel.cuts import EvenCut
from intarsia_parallel.roles.common import TENSOR, Groups, ParameterCuts, divisors, expect_linear, has_payload, is_plain, nearest, wrap
from intarsia_parallel.roles.region import entered


class AttentionHeads:
    """See the module. `is_region`: something inside must end it. `gathers_one`: the gather may be overlapped.
    `overrules`: names within the module whose own rows have nothing to say."""

    is_region = True

    def __init__(self, config: AttentionHeadsConfig) -> None:
        self.config = config
        self.gathers_one = config.gather
        # Query and key/value heads of the modules whose key/value projections stay whole, by name.
        self._whole: dict[str, tuple[int, int]] = {}

    def check(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> None:
        """tp divides the query heads, and the settings name what is there."""
        config, ranks = self.config, sizes[TENSOR]
        self._projection(name, module, config.queries, "queries")
        for each in config.keys_values:
            self._projection(name, module, each, "keys_values")
        heads = self.heads(name, module)
        if heads % ranks:
            raise UsageError(
                f"{name} has {heads} query heads, which tp={ranks} does not divide. The nearest degrees that do: {nearest(ranks, divisors(heads))}."
            )
        kv_heads = self.kv_heads(name, module) if config.keys_values else heads
        if heads % kv_heads:
            raise UsageError(f"{name}: {heads} query heads cannot share {kv_heads} key/value heads equally.")
        if config.per_kv_head and kv_heads % ranks:
            raise UsageError(
                f"{name} has {kv_heads} key/value heads, which tp={ranks} does not divide, and parameters with one row for each ({', '.join(config.per_kv_head)}). "
                f"The nearest degrees that do: {nearest(ranks, divisors(kv_heads))}."
            )
        for field, rows in (("per_head", heads), ("per_kv_head", kv_heads)):
            for each in getattr(config, field):
                parameter = _find(module, each)
                if parameter is not None and parameter.shape[0] % rows:
                    raise UsageError(f"{name}.{each} ({field}) has {parameter.shape[0]} rows, no multiple of {rows} heads.")

    def cut(self, name: str, module: nn.Module, sizes: Mapping[str, int]) -> ParameterCuts:
        """The query projection and what belongs to heads; key/value projections where they can be shared out, else `overrules` keeps them whole."""
        config = self.config
        heads = self.heads(name, module)
        cuts: dict[str, tuple[str, Placement]] = {}

        def add(owner: str, keys: tuple[str, ...], count: int) -> None:
            for key in keys:
                full = f"{owner}.{key}" if owner else key
                parameter = _find(module, full)
                if parameter is not None:
                    cuts[full] = (TENSOR, EvenCut(0, parameter.shape[0] // count))

        add(config.queries, ("weight", "bias"), heads)
        add("", config.per_head, heads)
        kv_heads = self.kv_heads(name, module) if config.keys_values else 0
        if kv_heads % sizes[TENSOR]:
            self._whole[name] = (heads, kv_heads)
            return cuts
        for each in config.keys_values:
            add(each, ("weight", "bias"), kv_heads)
        add("", config.per_kv_head, kv_heads or heads)
        return cuts

    def overrules(self, name: str, module: nn.Module) -> list[str]:
        """Parameters within the module that this role alone decides on."""
        owners = (self.config.queries, *self.config.keys_values)
        return [f"{owner}.{key}" for owner in owners for key in ("weight", "bias")] + [*self.config.per_head, *self.config.per_kv_head]

    def apply(self, name: str, module: nn.Module, groups: Groups) -> None:
        """Gather at the entry; slice key/value heads that are whole."""
        comm = groups(TENSOR)
        if comm.size == 1:
            return
        if self.config.gather:
            wrap(module, entered, comm, name, 1, module)
        if name not in self._whole:
            return
        heads = kv_heads_of(*self._whole[name], comm)
        width = int(getattr(module, self.config.kv_head_dim))
        is_range = heads == list(range(heads[0], heads[0] + len(heads)))
        parts = [(heads[0] * width, len(heads) * width)] if is_range else [(head * width, width) for head in heads]
        for each in self.config.keys_values:
            projection: Any = module.get_submodule(each)
            wrap(projection, _sliced, projection, parts)
            # What the module says of its caches is about the heads that it makes.
            projection.out_features = len(heads) * width

    def heads(self, name: str, module: nn.Module) -> int:
        """Query heads that the module has now."""
        return self._count(name, module, self.config.queries, self.config.head_dim)

    def kv_heads(self, name: str, module: nn.Module) -> int:
        """Key/value heads that the module has now."""
        return self._count(name, module, self.config.keys_values[0], self.config.kv_head_dim)

    def _count(self, name: str, module: nn.Module, projection: str, attribute: str) -> int:
        width = getattr(module, attribute, None)
        outputs: Any = module.get_submodule(projection).out_features
        if not isinstance(width, int) or width < 1 or outputs % width:
            raise UsageError(
                f"{name} has the role attention_heads, whose heads are counted as {projection}'s {outputs} outputs by the attribute {attribute!r} "
                f"({type(module).__name__}.{attribute} is {width!r}). Name the head's width in the role's settings (head_dim, kv_head_dim)."
            )
        return int(outputs) // width

    def _projection(self, name: str, module: nn.Module, projection: str, field: str) -> None:
        known = dict(module.named_modules())
        if projection not in known:
            raise UsageError(
                f"{name} has the role attention_heads, whose setting {field} names {projection!r}; {type(module).__name__} has no such module. "
                f"{did_you_mean(projection, [each for each in known if each])}"
            )
        expect_linear(f"{name}.{projection}", known[projection], "attention_heads")


def kv_heads_of(heads: int, kv_heads: int, comm: Communicator) -> list[int]:
    """The key/value heads that this rank makes, in the order in which its query heads read them: each of its key/value heads once where they serve equally many of its
    query heads, else one for each query head."""
    local, group = heads // comm.size, heads // kv_heads
    read = [head // group for head in range(comm.rank * local, (comm.rank + 1) * local)]
    distinct = sorted(set(read))
    shared = [head for head in distinct for _ in range(local // len(distinct))]
    return distinct if shared == read else read


def _sliced(module: Any, parts: list[tuple[int, int]], forward: Callable[[Tensor], Tensor], x_BSD: Tensor) -> Tensor:
    """The projection's outputs within `parts` (begin, count), one after the other."""
    if has_payload(module) or not is_plain(module):
        return _rows(forward(x_BSD), -1, parts)
    return ops.linear(x_BSD, _rows(module.weight, 0, parts), None if module.bias is None else _rows(module.bias, 0, parts))


def _rows(x: Tensor, dim: int, parts: list[tuple[int, int]]) -> Tensor:
    return x.narrow(dim, *parts[0]) if len(parts) == 1 else torch.cat([x.narrow(dim, *part) for part in parts], dim)


def _find(module: nn.Module, name: str) -> nn.Parameter | None:
    owner, _, attribute = name.rpartition(".")
    found = getattr(dict(module.named_modules()).get(owner), attribute, None)
    return found if isinstance(found, nn.Parameter) else None


def build(config: AttentionHeadsConfig) -> AttentionHeads:
    """The entry's target."""
    return AttentionHeads(config)
